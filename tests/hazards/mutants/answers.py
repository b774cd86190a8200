"""Faults of prompts, chats and their targets: rows 6, 42, 47 and 48."""

from tests.hazards.mutants.table import Mutant

DATA = "data/test_reading.py::"
TEMPLATE = "data/test_chat_template.py::"
SEVERAL = "gradients/test_exactness.py::test_every_pair_of_values[ghost-(1, 1, 1)]"

CHATS = "data/chat_template.py"

MUTANTS = [
    Mutant(
        6,
        "tokens of prompts are targets",
        "data/samples.py",
        "        labels_T[:count][ids[1:] < 0] = IGNORE_INDEX\n",
        "        labels_T[:count] = np.where(ids < 0, ~ids, ids)[1:]\n",
        (f"{DATA}test_row06_only_the_answer_and_its_end_are_targets",),
        quick=True,
    ),
    Mutant(
        6,
        "the sign of a prompts ids is lost",
        "data/reading.py",
        "ids if piece.is_target else ~ids",
        "ids",
        (f"{DATA}test_row06_only_the_assistants_turns_are_targets",),
        quick=True,
    ),
    Mutant(
        6,
        "the users turns are targets",
        CHATS,
        "        pieces.append(Piece(before[len(done) :], False))\n",
        "        pieces.append(Piece(before[len(done) :], True))\n",
        (f"{TEMPLATE}test_the_assistants_turns_are_what_the_template_adds_for_them",),
        quick=True,
    ),
    Mutant(
        6,
        "divided by a microbatchs mean number of targets",
        "models/loss.py",
        "        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)\n",
        "        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)\n"
        "        targets_B = targets_B.float().mean().expand(len(targets_B))\n",
        (SEVERAL,),
    ),
    Mutant(
        42,
        "a record without an answer is not drawn",
        "data/batching.py",
        "            yield self.microbatch(dealt, draw.key)\n",
        "            microbatch = self.microbatch(dealt, draw.key)\n"
        "            if (microbatch.labels_BT != IGNORE_INDEX).any():\n"
        "                yield microbatch\n",
        (f"{DATA}test_row42_a_record_without_an_answer_contributes_nothing_and_stays[0]",),
        quick=True,
    ),
]
