"""What the default suite leaves out: further cases of what it checks, and some whole runs.

    ./scripts/run_tests.sh -m thorough      # these alone, in some minutes

Each is a pattern of node ids below `tests/`. A test that is named by its id runs always.
"""

import re

PATTERNS = (
    # The game with every way to sum and noise; the faults in these are flagged by default.
    r"hazards/test_audit\.py::test_row35_the_clean_build_.*"
    r"\[(grad_sample|secure|exact.*|ghost|per layer.*|capped.*)\]",
    r"hazards/test_audit\.py::test_row35_flags_on_two_ranks\[norms not reduced-.*",
    r"hazards/test_audit\.py::test_row35_and_56_with_adapters_it_stays_.*",
    r"hazards/test_audit\.py::test_row35_and_56_flags_in_adapters(_on_two_ranks)?"
    r"\[(?!no noise on|noise named by kind).*",
    r"hazards/test_audit\.py::test_canaries_lie_in_adapters"
    r"\[\((1, 1, 2\)-grad_sample|1, 1, 1\)-microbatch|1, 2, 1\)-.*)\]",
    r"hazards/test_audit\.py::test_canaries_in_adapters_of_a_run",
    r"hazards/test_audit\.py::test_row35_and_49_flags_.*\[(no clipping|half the secure).*",
    r"selfcheck/test_stand_in\.py::test_every_check_.*\[(2|4)\]",
    # A SLURM and two hosts, for minutes, as root; the script's parts run by default.
    r"clusters/test_slurm\.py::test_.*",
    r"clusters/test_two_hosts\.py::test_.*",
    r"references/test_nothing_moved\.py::test_weights_.*"
    r"\[(?!(microbatch, cp2|(randomized|prompts|windows|lora), 1)\]).*",
    # One command or run, whole, of what others test in parts.
    r"test_benchmark\.py::test_(one_tiny_run|bytes_sent_by_each_collective)",
    r"test_paper_predictions\.py::test_(a_tiny_table|few_layers_tell|a_longer_sample)_.*",
    r"test_paper_predictions\.py::test_predicted_is_what_.*\[(one rank|FSDP)\]",
    r"test_gpu_report\.py::test_what_is_done_is_not_run_again_and_all_parts_are_listed",
    r"test_meshes\.py::test_row12_the_weights_change_alike_on_every_mesh\[(cp2|cp4|cp2_dp_replicate2)\]",
    r"checkpoint/test_resume\.py::test_a_run_with_a_debug_seed_stays_not_private",
    r"test_meshes\.py::test_row12_and_49_so_it_does_with_an_exact_sum",
    r"test_meshes\.py::test_weights_kept_gathered_change_no_bit_of_a_run\[.*",
    r"test_benchmark\.py::test_counts_of_both_methods_against_plain",
    r"distributed/test_cpu\.py::test_torchtitan_still_needs_it",
    # Kernels compiled by Inductor in the place of CUDA's, and the search of their cache.
    r"hazards/test_run\.py::test_hazard_30_no_compile_cache_holds_a_key",
    r"data/test_batching\.py::test_clipped_sum_is_the_same\[degrees(5|6|8)-.*",
    r"preflight/test_rehearsal\.py::test_row47_a_rehearsal_changes_nothing"
    r"\[(compile( grad_sample)?|offload|one length)\]",
    r"preflight/test_rehearsal\.py::test_row47_ranks_of_one_cp_group_.*\[microbatch\]",
    r"gradients/test_compiled_regions\.py::test_equals_the_loop"
    r"\[(\(1, 1, [12]\)-[023]|\(1, 2, 2\)-)\]",
    r"gradients/test_compiled_regions\.py::test_inductor",
    r"gradients/test_exactness\.py::test_compiled_blocks\[inductor\]",
    r"models/test_loss_head\.py::test_compiled_blocks",
    r"models/test_loss_head\.py::test_losses_and_gradients_compile_into_one_kernel",
    r"privacy/test_clipping\.py::test_clip_and_add_compiles_into_one_kernel",
    r"models/test_regions\.py::test_regions_are_single_kernels",
    r"models/test_regions\.py::test_lengths_and_validation_stay_within_the_limit_of_graphs",
    r"models/test_hugging_face_run\.py::test_saved_at_cp_4_resumed_at_cp_2_dp_shard_2",
    r"models/test_regions\.py::test_row04_.*\[inductor\]",
    r"preflight/test_rehearsal\.py::test_row47_a_resumed_run_.*\[microbatch\]",
    r"preflight/test_rehearsal\.py::test_row47_padding_.*\[(selective|offload)\]",
    r"distributed/test_offload\.py::test_equals_the_loop\[compiled-\(1, 1, 1\)\]",
    # What a rehearsal is for, seen without it.
    r"hazards/test_crashes\.py::test_row47_without_a_rehearsal_neighbours_end_differently",
    r"gradients/test_compiled_regions\.py::test_bf16_.*",
    r"preflight/test_rehearsal\.py::test_row47_a_rehearsal_changes_nothing\[secure\]",
    # More meshes, ways to recompute and to rotate, for a method that has some by default.
    r"hazards/test_clipping\.py::test_row01_.*\[(microbatch-4|V1-.*|ghost_two-[14])\]",
    r"hazards/test_clipping\.py::test_row02_.*\[\((1, 1, 4|1, 2, 2)\)-(microbatch|ghost_two)\]",
    r"hazards/test_clipping\.py::test_row04_.*\[\(1, \d, 2\)-V1\]",
    r"hazards/test_clipping\.py::test_row17_.*\[(\(2, 1, 2\)-ghost|\(1, 2, 1\)-ghost_two)\]",
    r"hazards/test_clipping\.py::test_row22_.*\[\(1, [12], 2\)-(inf-.*|.*-V1|.*-ghost)\]",
    r"hazards/test_audit\.py::test_an_included_canary_.*\[\((1, 2, 2\)-microbatch|2, 1, 2\)-).*",
    r"data/test_batching\.py::test_clipped_sum_is_the_same\[degrees[34]-.*",
    r"data/test_feed\.py::test_row32_a_cp_group_.*\[\((1, 1, 4|1, 2, 2)\)\]",
    r"gradients/test_grad_sample\.py::test_row0[457]_.*-V1\]",
    r"gradients/test_ghost\.py::test_row13_.*-\(1, 1, 2\)-one\]",
    r"gradients/test_exactness\.py::test_ring_variants\[4-.*",
    r"gradients/test_exactness\.py::test_activation_checkpointing\[no_early_stop-.*",
    r"gradients/test_gathered\.py::test_weights_are_gathered_once_a_step_and_change_no_bit"
    r"\[(microbatch, (cp 2.*|dp_shard 2, never)|grad_sample, (tied|offload|dp_shard 2, .*))\]",
    r"gradients/test_gathered\.py::test_weights_.*\[microbatch, dp_.* 2, cp 2.*\]",
    r"gradients/test_grad_sample\.py::test_activation_checkpointing\[.*-no_early_stop-.*",
    r"gradients/test_grad_sample\.py::test_every_mesh\[\(1, [12], [24]\)-4-.*",
    r"gradients/test_grad_sample\.py::test_every_mesh\[\(\d, \d, \d\)-2-.*-V1\]",
    r"gradients/test_grad_sample\.py::test_large_layers_go_one_sample_at_a_time\[\(1, 2, 2\)-.*",
    r"gradients/test_ghost\.py::test_every_mesh\[(\(1, 4, 1\)|\(2, 1, [12]\)|\(1, 2, 1\)).*",
    r"gradients/test_ghost\.py::test_every_mesh\[\(1, 1, 2\)-(3-.*|2-\{'tie.*)",
    r"gradients/test_ghost\.py::test_every_mesh\[\(1, 2, 2\)-2-\{'dim': 40.*",
    r"gradients/test_ghost\.py::test_every_mesh\[\(1, [12], 2\)-.*-two\]",
    r"gradients/test_ghost\.py::test_row05_and_07_.*\[2-0-two\]",
    r"gradients/test_ghost\.py::test_activation_checkpointing\[(\(1, 2, 1\)-.*|.*-selective-two)\]",
    r"gradients/test_ghost\.py::test_bf16_.*\[\(1, 2, 2\)-.*",
    r"gradients/test_ghost\.py::test_row49_.*\[\(1, 2, 2\)-two\]",
    r"gradients/test_ghost\.py::test_row05_and_07_.*\[2-1-.*",
    r"gradients/test_randomized_norm\.py::test_every_mesh\[\((1, 2, [12]|2, 1, [12]|1, 1, 4)\).*",
    r"gradients/test_randomized_norm\.py::test_every_mesh\[\(1, 1, 1\)-4-.*-hutchinson\]",
    r"gradients/test_randomized_norm\.py::test_every_mesh\[\(1, 1, 2\)-2-one-.*-hutch\+\+\]",
    r"gradients/test_randomized_norm\.py::test_every_mesh\[\(1, 1, 2\)-2-two-.*-hutchinson\]",
    r"gradients/test_randomized_norm\.py::test_a_cap_takes_.*",
    r"gradients/test_randomized_norm\.py::test_capped_estimates\[\(1, 2, [12]\).*",
    r"gradients/test_randomized_norm\.py::test_activation_checkpointing"
    r"\[(\(1, 1, 2\)-.*|.*-selective-.*|.*-full-one)\]",
    r"gradients/test_lora\.py::test_every_mesh\[\((1, 2, 2|2, 1, 1)\)-.*",
    r"gradients/test_lora\.py::test_every_mesh\[\((1, 1, 2|1, 2, 1)\)-(V1|ghost two)\]",
    r"gradients/test_lora\.py::test_every_mesh\[\(1, 2, 1\)-ghost\]",
    r"gradients/test_lora\.py::test_activation_checkpointing\[(selective|op|offload)-.*",
    r"gradients/test_lora\.py::test_activation_checkpointing\[full-(V1|ghost.*)\]",
    r"gradients/test_lora\.py::test_tied_embeddings_and_few_targets\[(V1|ghost.*)\]",
    r"gradients/test_lora\.py::test_frozen_weights_of_16_bits\[(V1|V2|ghost.*)\]",
    r"gradients/test_lora\.py::test_(compiled|factors_clipped_apart|27M_.*)\[.*",
    r"models/test_lora\.py::test_(27M_.*|peft_loads_the_folder\[given_27M\])",
    r"models/test_lora_run\.py::test_(without_privacy|a_checkpoint_with_.*|adapters_begin_.*|.*as_if.*)",
    r"models/test_lora_run\.py::test_row56_a_run_whose_.*\[no-enable\]",
    r"models/test_ema_run\.py::test_(it_changes_no_bit|another_(mesh|decay)|with_adapters|without)_.*",
    r"gradients/test_per_layer\.py::test_every_mesh\[(\(1, [24], 1\)|\(2, 1, 1\)|\(1, 1, 4\))-.*",
    r"gradients/test_per_layer\.py::test_.*\[\(1, 2, 2\)-ghost\]",
    r"gradients/test_per_layer\.py::test_.*\[(.*-)?(V1|ghost_two)\]",
    r"gradients/test_per_layer\.py::test_activation_checkpointing\[(selective-.*|full-microbatch)\]",
    r"gradients/test_per_layer\.py::test_row49_an_exact_sum\[\(1, 2, 2\)-microbatch\]",
    r"gradients/test_ghost_norm\.py::test_row01_.*\[.*-200\]",
    r"gradients/test_exact_sum\.py::test_row49_the_exact_sum_is_the_loops\[\(\d, \d, \d\)-V1\]",
    r"gradients/test_exact_sum\.py::test_row49_whichever_rank_.*\[\((1, 4, 1|2, 2, 1)\)\]",
    r"gradients/test_exact_sum\.py::test_row49_more_ranks_change_no_bit",
    r"gradients/test_exact_sum\.py::test_row12_and_49_.*\[microbatch-\(2, 1, 2\)\]",
    r"hazards/test_noise\.py::test_row08_variance_.*\[\((1, 1, 2|2, 1, 2)\)-[03]\]",
    r"hazards/test_clipping\.py::test_row27_live_tensors_.*\[(none|selective)-.*",
    r"hazards/test_clipping\.py::test_row13_hundreds_of_small_adds\[(grad_sample|ghost.*)\]",
    r"hazards/test_clipping\.py::test_row22_a_poisoned_sample_.*\[\(1, 2, 2\)-(nan|inf)-.*",
    # Numbers on a finer grid.
    r"privacy/test_summation\.py::test_row49_in_fixed_point_.*\[(0\.000.*|1e.*|1000000000\.0|3\.0)\]",
    r"privacy/test_accounting\.py::test_sigma_never_overshoots_the_target\[.*-prv\]",
    r"privacy/test_meaning\.py::test_hazard_37_compositions_.*\[(long|half)\]",
    r"privacy/test_meaning\.py::test_extremes_have_numbers\[(10000|1)\.0-.*",
    r"plan/test_plan\.py::test_hazard_38_target_is_not_overshot\[0\.5-.*",
    r"privacy/test_accountants\.py::test_hazard_37_every_.*\[(0\.8|1\.0|1\.5|4\.0)-.*",
    r"hazards/test_audit\.py::test_row35_and_67_.*\[(hutch\+\+-.*|hutchinson-None)\]",
    # By other accountings and programs, and by more simulations.
    r"privacy/test_randomized\.py::test_(the_papers_pair|hidden_projections|its_event_gives).*",
    r"privacy/test_randomized\.py::test_a_simulation_agrees\[(0\.8-.*|.*-False)\]",
    # Whole runs on records that other tests make samples of.
    r"test_answer_run\.py::test_(chats_are_trained_on_and_told|replicas_tell_.*)",
    r"plan/test_memory\.py::test_windows_hold_one_more_gradient",
    # More meshes of what is averaged.
    r"gradients/test_windows\.py::test_row57_the_mean_is_clipped_once"
    r"\[(\(1, 2, 2\)-.*|\(1, 1, 2\)-.*checkpointing.*)\]",
    r"data/samples/test_chat_template\.py::test_texts_and_marks_are_those_of_transformers\[template0\]",
    # Killed otherwise.
    r"checkpoint/test_resume\.py::test_killed_and_resumed\[kill_(all|worker)\]",
    r"models/test_hugging_face_run\.py::test_a_step_at_lr_0_changes_nothing\[untied-.*",
    # Predictions of other configurations.
    r"test_paper_tables\.py::test_what_cannot_be_predicted_says_why",
    r"plan/test_memory\.py::test_the_longest_configs_fit_four_ranks_of_80_gib\[.*",
    r"plan/test_memory\.py::test_predicted_is_what_.*"
    r"\[(one rank|two samples, exact sum|ghost norms.*|adapters|average)\]",
    r"plan/test_prediction\.py::test_weights_kept_gathered_are_all_.*\[(1-.*|2-overrides0)\]",
    r"plan/test_prediction\.py::test_what_bends_is_predicted_with_all_layers",
    r"plan/test_prediction\.py::test_few_layers_tell_the_peak_of_all\[.*",
    r"plan/test_memory\.py::test_row49_an_exact_sum_takes_eight_bytes_a_value\[.*=2\]",
    r"plan/test_memory\.py::test_(frozen_weights|an_average)_.*",
    # What all of selfcheck's checks show together; the mutants ask for each alone.
    r"selfcheck/test_power\.py::test_what_a_fault_fails_passes_without\[.*",
    r"selfcheck/test_power\.py::test_it_passes_here\[.*",
    r"selfcheck/test_cuda\.py::test_two_ranks_on_a_backend_by_name",
    # Selfcheck under other configurations, and with faults that others are like.
    r"selfcheck/test_power\.py::test_configurations_pass"
    r"\[(offload( bf16)?|automatic|adapters|compile.*|dp_replicate)\]",
    r"selfcheck/test_power\.py::test_a_fault_fails_it\[(own_tokens|sums_of_partial|noise_without"
    r"|noise_shared_by_par|chunk_edge_lost-1-clipped|adamw|checkpoint_without"
    r"|bad_samples_kept-1-.*grad_sample|another_samples|ring_.*-None|keys_of|noise_not_added).*",
)
_ALL = re.compile(r"tests/(" + "|".join(PATTERNS) + ")")


def is_thorough(node_id: str) -> bool:
    return _ALL.fullmatch(node_id) is not None
