"""Faults of prompts, chats and their targets: rows 6, 42, 47 and 48."""

from tests.hazards.mutants.table import Mutant

DATA = "data/samples/test_conversations.py::"
TEMPLATE = "data/samples/test_chat_template.py::"
GRADIENTS = "gradients/test_answers.py::test_row06_each_sample_is_divided_by_its_own_targets"
SEVERAL = f"{GRADIENTS}[(1, 1, 1)-ghost-3]"

SAMPLES, CHATS = "data/samples/samples.py", "data/samples/chat_template.py"

MUTANTS = [
    Mutant(
        6,
        "tokens of prompts are targets",
        SAMPLES,
        "            labels_T[:count][~excerpt.targets[1 : count + 1]] = IGNORE_INDEX\n",
        "            pass\n",
        (f"{DATA}test_row06_only_the_answer_and_its_end_are_targets",),
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
        "            valid = slots >= 0\n",
        "            counts = [self.samples.tokens(int(self.units[slot])) for slot in slots]\n"
        "            valid = (slots >= 0) & (np.array(counts) > 0)\n"
        "            if not valid.any():\n"
        "                continue\n",
        (f"{DATA}test_row42_a_record_without_an_answer_contributes_nothing_and_stays[0]",),
        quick=True,
    ),
]
