"""Faults of clipping: rows 1 to 7, 13, 18, 22, 26 to 29 and 36."""

from tests.hazards.mutants.table import Mutant

HERE = "hazards/test_clipping.py::"
EXACT = "gradients/test_exactness.py::test_every_pair_of_values"
LAYERS = "gradients/test_layers.py::"
ONE = "privacy/test_clipping.py::"
HEAD = "models/test_loss_head.py::"
TILES = "models/test_feed_forward.py::"
REGIONS = "models/test_regions.py::"

SUM = "gradients/clipped_sum.py"
CLIP = "privacy/clipping.py"

MUTANTS = [
    Mutant(
        1,
        "norm without the other cp ranks",
        SUM,
        "            dist.all_reduce(squares, group=self.groups.cp)\n",
        "            pass\n",
        (f"{EXACT}[microbatch-(1, 1, 2)]",),
    ),
    Mutant(
        1,
        "squared before the sum over cp",
        "gradients/fsdp.py",
        "            reduce_scatter_sum(shard_N, input_CN, self._cp)\n",
        "            shard_N.copy_(input_CN[dist.get_rank(self._cp)])\n",
        (f"{EXACT}[microbatch-(1, 1, 2)]",),
    ),
    Mutant(
        1,
        "V1 keeps its own tokens part",
        "gradients/grad_sample.py",
        "        dist.all_reduce(whole, group=cp)\n",
        "        pass\n",
        (f"{EXACT}[grad_sample, whole-(1, 1, 2)]",),
    ),
    Mutant(
        1,
        "V2 keeps its own tokens part of vectors",
        "gradients/fsdp.py",
        "    reduce_scatter_sum(shard, whole, cp)\n",
        "    shard.copy_(whole[dist.get_rank(cp)])\n",
        (f"{EXACT}[grad_sample-(1, 1, 2)]",),
    ),
    Mutant(
        1,
        "norm without the tokens of earlier tiles",
        "models/tiles.py",
        "            add_product_(of_weight, grad_NP.T, x_ND)\n",
        "            of_weight.copy_(grad_NP.T @ x_ND)\n",
        (f"{TILES}test_on_every_mesh[(1, 1, 2)-llama3-full]",),
    ),
    Mutant(
        1,
        "gradients of keys without the other ranks queries",
        "distributed/ring.py",
        "                gradients = self.of_gradients.receive().view(gradients.shape)\n",
        "                self.of_gradients.receive()\n",
        (f"{EXACT}[microbatch-(1, 1, 2)]",),
    ),
    Mutant(
        2,
        "a parameter not counted",
        SUM,
        "squared_norm(s.flatten(1)) for s in shards",
        "squared_norm(s.flatten(1)) for s in shards[1:]",
        (f"{EXACT}[grad_sample-(1, 1, 2)]",),
    ),
    Mutant(
        2,
        "uneven rows dropped",
        "gradients/fsdp.py",
        "            if start < stop:\n",
        "            if start + self.rows <= self.shape[0]:\n",
        (f"{LAYERS}test_chunks_and_positions_agree_with_fsdp",),
        quick=True,
    ),
    Mutant(
        3,
        "summed over dp shard before clipping",
        SUM,
        "        if self.policy.is_flat:\n",
        "        for s in shards:\n"
        "            if self.groups.dp_shard is not None:\n"
        "                dist.all_reduce(s, group=self.groups.dp_shard)\n"
        "        if self.policy.is_flat:\n",
        (f"{HERE}test_row03_opposite_samples_cancel_after_clipping[(1, 2, 1)]",),
    ),
    Mutant(
        4,
        "one norm for the microbatch",
        "privacy/clipping.py",
        "        return clip(\n",
        "        total_G1 = squared_norm_GB.sum(1, keepdim=True)\n"
        "        squared_norm_GB = total_G1.expand_as(squared_norm_GB)\n"
        "        return clip(\n",
        (
            f"{HERE}test_row04_opposite_samples_in_one_microbatch_cancel_after_clipping"
            "[(1, 1, 1)-V2]",
        ),
    ),
    Mutant(
        4,
        "the loss head merges samples",
        "models/loss_head.py",
        "        merges = differentiate and weight_needed and len(h_BTD) > 1\n",
        "        merges = False\n",
        (f"{HEAD}test_samples_are_never_merged",),
        quick=True,
    ),
    Mutant(
        4,
        "tiles of the feed-forward merge samples",
        "models/tiles.py",
        "        assert samples == 1 or not trains,",
        "        assert True,",
        (f"{TILES}test_samples_are_never_merged",),
        quick=True,
    ),
    Mutant(
        5,
        "loss over the microbatches targets",
        "models/loss_head.py",
        "    return 1 / targets_B.clamp(min=1).float()\n",
        "    return len(targets_B) / targets_B.sum().clamp(min=1).float().expand(len(targets_B))\n",
        (f"{HERE}test_row05_and_07_a_sample_knows_no_neighbour_in_its_microbatch[1-0-V1]",),
    ),
    Mutant(
        6,
        "a rank divides by its own targets",
        "models/loss.py",
        "labels=labels_BT, targets=targets_B,",
        "labels=labels_BT, targets=(labels_BT != IGNORE_INDEX).sum(dim=1),",
        (f"{EXACT}[microbatch-(1, 1, 2)]",),
    ),
    Mutant(
        6,
        "a shard without its positions",
        "models/loss.py",
        "targets=targets_B, **positions)",
        "targets=targets_B)",
        (f"{EXACT}[microbatch-(1, 1, 2)]",),
    ),
    Mutant(
        7,
        "a layer sees the other samples input",
        "gradients/operands.py",
        "write_product_(out_BRD, left_BPT[:, rows], right_BTD)",
        "write_product_(out_BRD, left_BPT[:, rows], right_BTD.roll(1, 0))",
        (f"{LAYERS}test_equals_a_loop_of_single_samples[linear without bias-4-(1, 1)]",),
        quick=True,
    ),
    Mutant(
        7,
        "records see each other in the model",
        "models/private.py",
        "        h_BTD = self.tok_embeddings(tokens)\n",
        "        h_BTD = self.tok_embeddings(tokens)\n"
        "        h_BTD = h_BTD + 1e-3 * h_BTD.mean(0, keepdim=True)\n",
        (f"{HERE}test_row05_and_07_a_sample_knows_no_neighbour_in_its_microbatch[1-0-V2]",),
    ),
    Mutant(
        4,
        "every sample gets the sum of a norms gradients",
        "models/llama3/regions.py",
        "Existing(grad_copies))",
        "Existing(grad_copies.sum(0).expand_as(grad_copies)))",
        (f"{REGIONS}test_copies_of_a_weight[torch.float32]",),
        quick=True,
    ),
]
