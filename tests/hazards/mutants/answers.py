"""Faults of prompts, chats and their targets: rows 6, 42, 47 and 48."""

from tests.hazards.mutants.table import Mutant

DATA = "data/samples/test_conversations.py::"
TEMPLATE = "data/samples/test_chat_template.py::"
GRADIENTS = "gradients/test_answers.py::test_row06_each_sample_is_divided_by_its_own_targets"
ONE = f"{GRADIENTS}[(1, 1, 1)-microbatch-1]"
CP = f"{GRADIENTS}[(1, 1, 2)-microbatch-1]"
SEVERAL = f"{GRADIENTS}[(1, 1, 1)-ghost-3]"

CONVERSATIONS = "data/samples/conversations.py"
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
        "targets one token early",
        SAMPLES,
        "~excerpt.targets[1 : count + 1]",
        "~excerpt.targets[:count]",
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
        "divided by the length of a sample",
        "models/loss.py",
        "        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)\n",
        "        targets_B = torch.full((len(labels_BT),), labels_BT.shape[1])\n",
        (ONE,),
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
        6,
        "divided by the targets of a ranks own part",
        "models/loss.py",
        "        loss_B: torch.Tensor = self.model(\n",
        "        targets_B = (labels_BT != IGNORE_INDEX).sum(dim=1)\n"
        "        loss_B: torch.Tensor = self.model(\n",
        (CP,),
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
    Mutant(
        42,
        "a malformed record stops the run",
        CONVERSATIONS,
        "        if prompt is None or answer is None:\n            return None\n",
        "        assert prompt is not None and answer is not None\n",
        (f"{DATA}test_row42_a_record_without_an_answer_contributes_nothing_and_stays[1]",),
        quick=True,
    ),
    Mutant(
        42,
        "what a template refuses stops the run",
        CHATS,
        "        except Exception:  # of any kind",
        "        except ZeroDivisionError:  # of any kind",
        (f"{DATA}test_row42_a_chat_without_an_answer_contributes_nothing_and_stays[11]",),
        quick=True,
    ),
    Mutant(
        42,
        "a prompt without an answer is learned",
        CONVERSATIONS,
        "        if not whole.targets.any():\n            return Marked.join([])\n",
        "",
        (f"{DATA}test_row42_a_record_without_an_answer_contributes_nothing_and_stays[0]",),
        quick=True,
    ),
    Mutant(
        47,
        "what templates render is not counted",
        CONVERSATIONS,
        "        budget.rendered -= dialog.cost  # whether it was refused or not\n",
        "",
        (f"{DATA}test_row47_looking_is_bounded",),
        quick=True,
    ),
    Mutant(
        48,
        "ids are kept without their targets",
        "data/samples/token_cache.py",
        '        return Excerpt(head.ids.astype("int64"), head.undecodable, targets)\n',
        '        return Excerpt(head.ids.astype("int64"), head.undecodable)\n',
        (f"{DATA}test_row48_kept_ids_keep_their_targets[prompts]",),
        quick=True,
    ),
    Mutant(
        47,
        "a chat that is refused costs nothing",
        CONVERSATIONS,
        "        budget.rendered -= dialog.cost  # whether",
        "        budget.rendered -= dialog.cost if dialog.pieces else 0  # whether",
        (f"{DATA}test_row47_looking_is_bounded[refused]",),
    ),
    Mutant(
        47,
        "rendering is counted when it is done",
        CHATS,
        "        self.cost += given + MESSAGE_COST * len(messages)\n",
        "",
        (f"{TEMPLATE}test_row47_what_is_refused_has_cost_as_much",),
    ),
]
