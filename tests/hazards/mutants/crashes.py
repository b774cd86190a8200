"""Faults by which a run's end tells of its records: row 47."""

from tests.hazards.mutants.table import Mutant

REHEARSAL = "preflight/test_rehearsal.py::test_row47_"
NOTHING = f"{REHEARSAL}a_rehearsal_changes_nothing[microbatch]"
MEMORY = f"{REHEARSAL}out_of_memory_is_one_line_before_step_1[cpu]"
PATH = f"{REHEARSAL}padding_takes_the_path_and_the_memory_of_samples"
EXCERPTS = "data/samples/test_excerpts.py::test_row47_"
NEIGHBOURS = "hazards/test_crashes.py::test_row47_"

MUTANTS = [
    Mutant(
        47,
        "no memory for a thread is another fault",
        "preflight/rehearsal.py",
        "    if text in _NO_THREAD:\n",
        "    if text == _NO_THREAD:\n",
        (f"{REHEARSAL}no_memory_for_a_thread_is_one_line_before_step_1[c++]",),
    ),
    Mutant(
        47,
        "no rehearsal",
        "train.py",
        "            rehearse(self)\n",
        "            pass\n",
        (MEMORY,),
    ),
    Mutant(
        47,
        "the longest sample not rehearsed",
        "preflight/rehearsal.py",
        "enumerate((rungs[0], *rungs))",
        "enumerate((rungs[0], *rungs[:-1]))",
        (f"{REHEARSAL}every_length_is_run_beside_the_optimizers_state",),
        quick=True,
    ),
    Mutant(
        47,
        "a length passes before the device has run it",
        "preflight/rehearsal.py",
        "            trainer.accumulate(feed.padding(length), statistics)\n"
        "            _wait_for(trainer.device)\n",
        "            trainer.accumulate(feed.padding(length), statistics)\n",
        (f"{REHEARSAL}what_fails_on_the_device_is_named_with_its_own_length",),
        quick=True,
    ),
    Mutant(
        47,
        "only the shortest samples rehearsed",
        "preflight/rehearsal.py",
        "enumerate((rungs[0], *rungs))",
        "enumerate((rungs[0], *rungs[:1]))",
        (f"{NEIGHBOURS}neighbours_end_alike_in_the_rehearsal",),
    ),
    Mutant(
        47,
        "the optimizers state is made by the first step",
        "preflight/rehearsal.py",
        "                trainer.dp_optimizer.rehearse(trainer.clipped_sum.take())\n",
        "                trainer.clipped_sum.take()\n",
        (NOTHING,),
    ),
    Mutant(
        47,
        "a rehearsed update is counted",
        "optimizer.py",
        "            value.zero_()\n",
        "            value.add_(0)\n",
        (NOTHING,),
    ),
    Mutant(
        47,
        "the learning rate stays zero",
        "optimizer.py",
        '        group["lr"] = rate\n',
        '        group["lr"] = 0.0 * rate\n',
        (NOTHING,),
    ),
    Mutant(
        47,
        "the sum is left in the middle of a step",
        "preflight/rehearsal.py",
        "    trainer.clipped_sum.reset()\n",
        "    del statistics\n",
        (NOTHING,),
    ),
    Mutant(
        47,
        "moments of a resumed run are reset",
        "optimizer.py",
        "            if not any(optimizer.state.values()):\n",
        "            if self._parameters:\n",
        (f"{REHEARSAL}a_resumed_run_is_the_same_with_a_rehearsal[microbatch]",),
    ),
    Mutant(
        47,
        "the head skips chunks without labels",
        "models/loss_head.py",
        "        scale_N = scale.expand(tokens.stop - tokens.start)\n",
        "        if tokens.start > 0 and (labels_T[tokens] < 0).all():\n"
        "            continue\n"
        "        scale_N = scale.expand(tokens.stop - tokens.start)\n",
        (f"{PATH}[microbatch]",),
    ),
    Mutant(
        47,
        "an audit takes canaries for padding",
        "data/feed.py",
        "        self.loader.samples.hand_out(",
        "        valid.any() and self.loader.samples.hand_out(",
        (f"{REHEARSAL}an_audit_is_rehearsed_too[grad_sample]",),
    ),
    Mutant(
        47,
        "workers check no more than their options",
        "train.py",
        "        records = check_run(config, open_records, share=here).records\n",
        "        records = open_records(config)\n",
        (f"{NEIGHBOURS}a_tokenizer_beyond_the_vocabulary_is_refused_by_every_worker",),
    ),
    Mutant(
        47,
        "every record is read as far as one",
        "data/samples/excerpts.py",
        '            budget.text -= len(text.encode("utf-8"))\n',
        "            budget.text -= 0\n",
        (f"{EXCERPTS}a_sample_is_tokenized_from_bounded_text[many texts-16]",),
        quick=True,
    ),
    Mutant(
        47,
        "any number of lines is parsed",
        "data/samples/excerpts.py",
        "        return self.text <= 0 or self.read <= 0 or self.rendered <= 0\n",
        "        return self.text <= 0\n",
        (f"{EXCERPTS}lines_that_are_parsed_for_nothing_are_few",),
        quick=True,
    ),
    Mutant(
        47,
        "a rank counts its whole share at once",
        "data/batching.py",
        "        self._samples, self._at_once = samples, at_once\n",
        "        self._samples, self._at_once = samples, 2**30\n",
        ("data/test_batching.py::test_row47_nobody_waits_for_more_than_a_few_samples_of_another",),
        quick=True,
    ),
    Mutant(
        47,
        "one line without the field refuses a start",
        "data/readable.py",
        "        if lacking + census.undecodable == census.lines:\n",
        "        if lacking + census.undecodable:\n",
        ("data/records/test_census.py::test_one_line_that_has_it_is_enough",),
        quick=True,
    ),
]
