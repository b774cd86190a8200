"""From per-sample losses to the sum of clipped gradients, with its reductions over cp and dp."""
