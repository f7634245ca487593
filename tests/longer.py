"""Cases that only `make soak` runs: each is one more of a kind of which `make test` keeps another, or is slow alone.

`file::test[case]`, or `file::test` for all of its cases.
"""

SOAK = """
docs/test_blocks.py::test_every_block_runs[hogwild.md]
docs/test_blocks.py::test_every_block_runs[local.md]
docs/test_blocks.py::test_every_block_runs[migrate-ddp-script.md]
docs/test_blocks.py::test_every_block_runs[migrate-plain-loop.md]
docs/test_blocks.py::test_every_block_runs[stages.md]
docs/test_blocks.py::test_every_block_runs[threads.md]
fault/test_asynchronous_kills.py::test_killed_at_random_it_ends_with_the_same_bits
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[a job that leaves, as if it was saved]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[a rule on a metric that there is not]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[a schedule that wants a metric]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[an average that is no decay]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[count is text]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[data that is a number]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[extra state that only pickle could write]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[half an optimizer]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[loss is a number]
fault/test_bad_inputs.py::test_refused_or_failed_soon_after_the_start[sync_bn without BatchNorm]
fault/test_closed_output.py::test_nobody_reads_and_the_run_goes_on[>&- 2>&-]
fault/test_full_disk.py::test_what_can_not_be_written_is_said_in_our_words[checkpoints/best]
fault/test_full_disk.py::test_what_can_not_be_written_is_said_in_our_words[consolidated]
fault/test_own_script.py::test_a_signal_ends_the_script_there[1-signal and break]
fault/test_own_script.py::test_a_signal_ends_the_script_there[1-signal]
fault/test_runs.py::test_one_signal_finishes_the_step_saves_and_says_go_on[15]
fault/test_runs.py::test_the_first_failing_rank_is_named[SystemExit 3]
fault/test_runs.py::test_the_first_failing_rank_is_named[exit 7]
fault/test_runs.py::test_the_first_failing_rank_is_named[rank 0 first, rank 1 later]
parity/test_best.py::test_the_best_model_gives_its_metric_in_plain_torch[False]
parity/test_by_hand.py::test_paceline_is_the_loop_by_hand[1]
parity/test_by_hand.py::test_paceline_is_the_loop_by_hand[4]
parity/test_by_hand.py::test_the_loops_by_hand_agree_on_every_rank[accumulate]
parity/test_by_hand.py::test_the_loops_run_as_their_first_line_says[accumulate]
parity/test_closed.py::test_it_is_near_the_replayed_step[zero1,remat=selective-1]
parity/test_compress.py::test_a_mistake_in_it_is_another_training[int8,block=8-scale]
parity/test_compress.py::test_a_mistake_in_it_is_another_training[topk,ratio=0.1-forgetful]
parity/test_compress.py::test_a_stop_changes_no_bit[topk,ratio=0.1]
parity/test_compress.py::test_each_is_its_serial_reference[2-int8,block=8]
parity/test_compress.py::test_each_is_its_serial_reference[2-topk,ratio=0.1]
parity/test_compress.py::test_the_bytes_that_are_told_are_those_that_are_sent[int8,block=8]
parity/test_compress.py::test_the_bytes_that_are_told_are_those_that_are_sent[topk,ratio=0.1]
parity/test_exact.py::test_any_number_of_ranks_gives_the_one_process_weights[5]
parity/test_local.py::test_a_site_may_be_any_layout
parity/test_local.py::test_an_outer_step_in_fragments_taken_later_is_its_serial_reference
parity/test_measured_memory.py::test_two_runs_of_one_setting_hold_the_same
parity/test_one_digest.py::test_exact_mode_ends_in_one_digest
parity/test_planted_in_layouts.py::test_the_fault_is_named_with_its_place[a norm's gradient not reduced over sequence shards]
parity/test_planted_in_layouts.py::test_the_fault_is_named_with_its_place[rows off by one]
parity/test_prove_sound.py::test_no_false_alarm[0]
parity/test_prove_sound.py::test_no_false_alarm[2]
parity/test_prove_sound.py::test_no_false_alarm[3]
parity/test_replicas.py::test_an_average_is_compared_as_the_weights_are[a rank's own decay]
parity/test_server.py::test_a_script_has_its_loop_on_the_server
parity/test_server.py::test_rows_of_a_table_are_pushed_alone_and_train_it_as_whole_ones_do
parity/test_server.py::test_verify_sees_a_planted_mistake[a share divided by another count]
parity/test_server.py::test_verify_sees_a_planted_mistake[samples of another share]
parity/test_shard.py::test_it_is_the_training_of_one_process[zero1-gpt-adamw]
parity/test_shard.py::test_with_shards_of_no_row_too[zero1-gpt-adamw]
parity/test_shard_uses.py::test_it_is_used_as_any_model[hidden]
parity/test_sometimes.py::test_statistics_written_past_the_layer_are_refused_by_name
parity/test_stash.py::test_models_whose_weights_can_not_change_places_are_refused[buffer]
parity/test_stash.py::test_models_whose_weights_can_not_change_places_are_refused[hook]
parity/test_stash.py::test_models_whose_weights_can_not_change_places_are_refused[list]
parity/test_verify.py::test_planted_faults_are_named[a layer frozen on one rank]
parity/test_verify.py::test_planted_faults_are_named[reduced twice]
parity/test_verify.py::test_sound_layouts_are_called_equal[2-words6]
parity/test_verify.py::test_sound_layouts_are_called_equal[2-words8]
parity/test_verify.py::test_sound_layouts_are_called_equal[2-words9]
parity/test_verify.py::test_sound_layouts_are_called_equal[3-words1]
parity/test_verify.py::test_sound_layouts_are_called_equal[3-words5]
""".split("\n")[1:-1]


def is_longer(name: str) -> bool:
    """Whether a test's name below `tests/` is one of these."""
    return name in SOAK or name.partition("[")[0] in SOAK
