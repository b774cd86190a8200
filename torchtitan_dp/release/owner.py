"""What a release's card must say and only its owner knows: lines to be filled in.

The list is what NIST SP 800-226 ("Guidelines for Evaluating Differential Privacy Guarantees", 2025)
and section 5.3 of Ponomareva et al. ("How to DP-fy ML", 2023) ask of a claim and the run does not
know.
"""

from typing import NamedTuple

BLANK = "**TO FILL IN**"


class OwnerItem(NamedTuple):
    """Holds one line for the owner."""

    title: str
    question: str


OWNER_ITEMS = (
    OwnerItem("License and base model", "Also in the front matter: `license`, `base_model`."),
    OwnerItem("Purpose", "What is the model for, and what is it not for?"),
    OwnerItem(
        "Origin of the data",
        "Where do the records come from, and on what legal ground or consent are they used?",
    ),
    OwnerItem(
        "Duplicates",
        "Does one person's content stand under several units, or several people's in one unit? "
        "What was removed?",
    ),
    OwnerItem(
        "Other uses of the data",
        "Which tuning runs, evaluations, statistics or other models of the same records were "
        "published or decided something? Their ε adds to the one above.",
    ),
    OwnerItem("Total budget", "What may all releases from these records spend together?"),
    OwnerItem(
        "Access",
        "Who can reach the records, the logs, the checkpoints and the machines that trained?",
    ),
    OwnerItem("Retention", "When are records, logs and checkpoints deleted?"),
    OwnerItem(
        "Audit",
        "What did `python -m torchtitan_dp.audit` find, on which records? (On the same ones, its "
        "published result spends ε as well.)",
    ),
    OwnerItem(
        "Quality",
        "How well does it do on public data, and for which groups of people worse than for others? "
        "Clipping and noise cost rare groups most.",
    ),
    OwnerItem("Source code", "Where can the program of the commit named above be read?"),
    OwnerItem("Contact", "Whom does one ask, and tell of a suspected leak?"),
)


def owner_section() -> str:
    """Return the card's section of lines to be filled in."""
    lines = [f"- **{item.title}.** {item.question}\n  {BLANK}" for item in OWNER_ITEMS]
    return "\n## For the owner to fill in\n\n" + "\n".join(lines) + "\n"
