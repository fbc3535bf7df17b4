"""Tests run on the CPU, whatever else is there, unless JAX_PLATFORMS says otherwise; targets that are not installed are
skipped, loudly.

With JAXCKPT_REQUIRE_TARGETS=1 (continuous integration) a missing target is a failure, so that nothing passes by not
running.
"""

from __future__ import annotations

import gc
import os
import pathlib
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# LLVM's optimisations come after XLA has scheduled a program and assigned its buffers: the bytes that are tested stay,
# and compiling takes a third less. It holds for the processes that tests start, too.
os.environ["JAXCKPT_CACHE_DIR"] = "off"
# What another run has compiled is compiled again, and nothing is written to the user's folder.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _COMPILED = tempfile.TemporaryDirectory(prefix="jaxckpt-tests-", ignore_cleanup_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _COMPILED.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
# What JAX compiles for this machine is compiled once in a run: workers, the processes that tests start, and files of
# tests, which `forget` separates, share it. What jaxckpt measures does not come from JAX's cache.

import jax
import pytest

from jaxckpt.memory.platforms import PLATFORMS


def _compile_quickly() -> None:
    """Has XLA compile for the CPU without its emitters of fused loops: in two thirds of the time.

    Programs that jaxckpt measures are compiled with them, as for its users, since a program then needs some bytes more
    or less. The processes that tests start compile as usual. JAX from 0.11 knows no such option.
    """
    if os.environ["JAX_PLATFORMS"] != "cpu" or jax.__version_info__ >= (0, 11):
        return
    before = os.environ.get("XLA_FLAGS")
    os.environ["XLA_FLAGS"] = f"{before or ''} --xla_cpu_use_fusion_emitters=false"
    jax.jit(lambda x: x + 1)(1)  # XLA reads the variable once, when it first compiles
    os.environ.pop("XLA_FLAGS") if before is None else os.environ.update(XLA_FLAGS=before)
    usual = PLATFORMS["cpu"].own_options
    PLATFORMS["cpu"].own_options = lambda local: usual(local) | {"xla_cpu_use_fusion_emitters": True}


_compile_quickly()


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.strip().splitlines()]


TRACING = """
    compat/test_source.py memory/test_buffers.py memory/test_estimate.py memory/test_wire.py
    core/test_addresses.py core/test_emit.py core/test_files.py core/test_flops.py core/test_graph.py
    core/test_liveness.py core/test_plan.py core/test_primitives.py core/test_purity.py
    core/test_surgery.py core/test_typed.py core/test_units.py
    planner/solvers/test_optimal.py planner/solvers/test_registry.py planner/solvers/test_rules.py planner/solvers/test_staircase.py
    planner/test_budget.py planner/test_chain.py planner/test_costs.py planner/test_mincut.py planner/test_stages.py
    show/test_plans.py test_docs.py test_errors.py test_glossary.py test_imports.py test_policies.py test_public.py
    transforms/test_scan_bytes.py transforms/test_schedules.py
""".split()  # noqa: SIM905 (a list of files is easier to read so)
"""Files and folders of tests that trace, and compile nothing larger than single operations. All others are marked
`compile`.
"""

ONCE = _lines("""
    actions/test_composed.py
    actions/test_compress.py
    actions/test_narrow.py
    actions/test_training_steps.py
    benchmarks
    core/test_bare.py
    core/test_constants.py
    core/test_pooling.py
    flax/test_resnet50.py
    memory/test_assign_cuda.py
    memory/test_cache.py
    memory/test_compare.py
    memory/test_estimate.py
    pages
    planner/solvers
    planner/test_adaptive.py
    planner/test_as_people_do.py
    planner/test_barriers.py
    planner/test_candidates.py
    planner/test_collectives.py
    planner/test_corrections.py
    planner/test_equinox.py
    planner/test_floor.py
    planner/test_frontier.py
    planner/test_guide.py
    planner/test_host.py
    planner/test_least_tiles.py
    planner/test_meshes.py
    planner/test_nested.py
    planner/test_odd_programs.py
    planner/test_remembered.py
    planner/test_scale.py
    planner/test_search.py
    planner/test_shards.py
    planner/test_tiles.py
    show
    test_cli.py
    test_docs.py
    test_examples.py
    test_glossary.py
    test_imports.py
    test_plan_files.py
    test_quiet.py
    test_templates.py
    test_training.py
    transforms/test_scan_budget.py
    transforms/test_scan_guide.py
    transforms/test_scan_random.py
    transforms/test_scan_tangents.py
    transforms/test_tile_random.py
    transforms/test_tile_sharded.py
    transforms/test_tile_whole.py
    transforms/test_two_levels.py
    actions/test_actions.py::test_one_more_action_makes_no_plan_dearer
    actions/test_actions.py::test_the_planner_takes_it_where_it_pays
    actions/test_offload.py::test_the_tpu_holds_none_of_it[unrolled]
    core/test_liveness.py::test_on_models_it_is_within_a_fifth
    flax/test_nnx_steps.py::test_a_loss_within_a_train_step_is_planned_with_what_it_closes_over
    flax/test_nnx_steps.py::test_a_step_with_an_optimizer_is_planned_and_trains_alike
    flax/test_nnx_steps.py::test_state_changes_once_a_step
    flax/test_nnx_steps.py::test_the_compiled_peak_is_within_the_budget[default]
    flax/test_nnx_steps.py::test_the_leaves_of_a_model_are_each_counted_once
    flax/test_nnx_steps.py::test_what_only_measures_changes_no_state
    memory/test_assign_tpu.py::test_all_figures_of_memory_are_those_of_the_whole_compilation[_in_host_memory]
    memory/test_assign_tpu.py::test_checkpoints_are_in_the_program_that_is_compiled_there
    memory/test_platforms.py::test_a_row_is_compiled_for
    memory/test_report.py::test_checkpointing_in_segments_lowers_the_peak_and_one_checkpoint_around_everything_does_not
    memory/test_report.py::test_the_memory_of_a_process_that_runs_the_step_falls
    memory/test_targets.py::test_the_native_libraries_stay_silent
    planner/test_auto.py::test_a_fresh_process_reads_the_plan_and_compiles_to_the_same_peak
    planner/test_inside.py::test_a_plan_lies_in_the_body_fits_and_recomputes_less_than_each_block[unrolled-a call]
    planner/test_inside.py::test_an_action_of_ones_own_keeps_values_of_a_mapped_function
    planner/test_inside.py::test_an_infeasible_budget_names_operations_of_the_body
    planner/test_inside.py::test_blocks_that_gather_their_weights_from_eight_devices_are_planned
    planner/test_inside.py::test_where_no_plan_of_the_body_fits_the_function_is_planned_from_outside
    transforms/test_scan.py::test_a_long_lstm_on_an_h100_takes_a_small_part_of_lax_scans_temporaries
    transforms/test_scan.py::test_values_and_gradients_are_those_of_lax_scan
    transforms/test_scan_sharded.py::test_each_device_keeps_its_share_of_the_carries[schedule2]
    transforms/test_tile.py::test_in_a_function_that_is_planned
    transforms/test_tile.py::test_the_compiled_peak_falls
""")
"""Folders, files and single tests that are marked `once`: what they ask differs between no two versions of JAX or
Python, or is asked by other tests in a smaller form.
"""

LONG = _lines("""
    actions/test_compress.py::test_unrolled_layers_need_less_by_what_is_kept_less[tpu:v5e:2x2-int4]
    actions/test_compress.py::test_what_is_restored_is_within_the_error[60]
    actions/test_offload.py::test_in_shard_map_nothing_of_a_layer_waits_for_the_gradients_of_weights_that_devices_add_up[tpu:v5e:2x2]
    actions/test_offload.py::test_the_tpu_holds_none_of_it[scanned, prevent_cse]
    actions/test_offload.py::test_the_tpu_holds_none_of_it[scanned]
    actions/test_shard.py::test_gradients_are_equal_and_each_device_keeps_its_part[explicit]
    actions/test_shard.py::test_gradients_are_equal_and_each_device_keeps_its_part[inside]
    actions/test_shard.py::test_gradients_are_equal_and_each_device_keeps_its_part[outside]
    benchmarks/test_attention.py::test_a_plan_runs_no_attention_again[pallas]
    benchmarks/test_floor.py::test_a_row_is_filled_in_and_resumes
    benchmarks/test_frontier.py::test_a_plan_runs_in_a_process_of_its_own_and_takes_what_it_was_compiled_to_take
    benchmarks/test_gpt2.py::test_compare_says_what_bare_jax_compiles_to_in_the_known_order_and_size
    benchmarks/test_parity.py::test_a_preset_has_the_peak_and_the_matmuls_of_its_counterpart
    benchmarks/test_parity.py::test_presets_differ_from_one_another
    benchmarks/test_pod.py::test_a_training_step_on_many_chips_is_planned_within_its_budget
    benchmarks/test_pod.py::test_tokens_without_room_are_dropped
    benchmarks/test_pod.py::test_values_and_gradients_are_those_of_one_device
    benchmarks/test_speed.py::test_a_policy_adds_at_most_a_quarter_to_the_lowering_of_a_gradient
    core/test_bare.py::test_a_model_of_nnx_with_checkpoints_is_planned_without_them
    core/test_bare.py::test_a_plan_may_open_what_its_user_checkpointed[unrolled]
    core/test_bare.py::test_frontier_and_autocheckpoint_open_them_too
    flax/test_nnx_steps.py::test_a_split_model_is_planned_with_its_graph_as_an_argument
    flax/test_nnx_steps.py::test_flags_and_shapes_go_beside_a_model
    flax/test_nnx_steps.py::test_state_changes_once_a_step[autocheckpoint]
    flax/test_nnx_steps.py::test_the_compiled_peak_is_within_the_budget[nnx]
    flax/test_resnet50.py::test_running_statistics_after_ten_steps_are_equal_with_and_without
    memory/test_assign_cuda.py::test_all_figures_of_a_gpu_are_those_of_the_whole_compilation[wide]
    memory/test_assign_tpu.py::test_all_figures_of_memory_are_those_of_the_whole_compilation[_sharded]
    memory/test_assign_tpu.py::test_all_figures_of_memory_are_those_of_the_whole_compilation[donated]
    memory/test_assign_tpu.py::test_all_figures_of_memory_are_those_of_the_whole_compilation[offloaded]
    memory/test_assign_tpu.py::test_all_figures_of_memory_are_those_of_the_whole_compilation[switches]
    memory/test_assign_tpu.py::test_all_figures_of_memory_are_those_of_the_whole_compilation[switches_in_a_loop]
    memory/test_assign_tpu.py::test_where_no_process_can_be_had_the_program_is_compiled_in_this_one_and_the_log_says_so[/bin/false]
    memory/test_estimate.py::test_compiled_chains_have_what_it_says[cuda:h100-2]
    planner/solvers/test_bound.py::test_a_plan_of_many_stages_by_it_fits_and_recomputes
    planner/test_adaptive.py::test_an_error_that_the_runtime_raises_later_is_waited_for[True]
    planner/test_adaptive.py::test_nnx_modules_hold_what_they_held_when_the_step_runs_again[True]
    planner/test_adaptive.py::test_where_nothing_tighter_is_feasible_the_first_error_says_what_was_tried
    planner/test_as_people_do.py::test_a_plan_at_the_peak_of_a_checkpoint_around_each_block[branches]
    planner/test_as_people_do.py::test_unlike_layers_in_no_more_than_checkpoints_around_each_need[a rule, another-cpu]
    planner/test_as_people_do.py::test_unlike_layers_in_no_more_than_checkpoints_around_each_need[a rule-cuda:h100]
    planner/test_as_people_do.py::test_unlike_layers_in_no_more_than_checkpoints_around_each_need[dropout-cuda:h100]
    planner/test_as_people_do.py::test_unlike_layers_in_no_more_than_checkpoints_around_each_need[no matmul-cuda:h100]
    planner/test_as_people_do.py::test_unlike_layers_in_no_more_than_checkpoints_around_each_need[one-cpu]
    planner/test_as_people_do.py::test_unlike_layers_in_no_more_than_checkpoints_around_each_need[one-cuda:h100]
    planner/test_auto.py::test_constants_of_the_function_are_computed_and_not_held
    planner/test_barriers.py::test_a_tag_far_from_what_makes_or_reads_its_value_changes_no_plan[tagged_after-tanh_layers]
    planner/test_barriers.py::test_the_chain_knows_what_barriers_make_the_compiler_write[first]
    planner/test_collectives.py::test_sums_that_the_compiler_puts_in_are_of_all_devices_of_their_axes[False-tpu:v5e:2x4]
    planner/test_corrections.py::test_a_loss_in_tiles_needs_most_before_its_backward_pass_and_the_chain_learns_it
    planner/test_corrections.py::test_a_step_that_has_the_loss_in_a_loop_of_its_own_is_planned_all_the_same
    planner/test_corrections.py::test_corrected_by_a_solution_the_chain_says_of_it_what_the_trace_says[unet]
    planner/test_corrections.py::test_each_run_of_each_region_is_found_in_the_trace[unet]
    planner/test_corrections.py::test_regions_are_in_scopes_only_where_that_is_asked_for[unet]
    planner/test_corrections.py::test_the_moments_of_a_solution_peak_where_it_does[unet]
    planner/test_corrections.py::test_users_see_no_scopes_and_a_plan_is_not_compiled_twice
    planner/test_corrections.py::test_what_a_solution_teaches_holds_for_the_next[unet]
    planner/test_corrections.py::test_what_is_traced_once_for_all_plans_is_what_is_traced_for_each[gpt]
    planner/test_corrections.py::test_what_is_traced_once_for_all_plans_is_what_is_traced_for_each[unet]
    planner/test_corrections.py::test_what_one_solution_teaches_holds_for_the_others[unet-middle]
    planner/test_corrections.py::test_what_one_solution_teaches_holds_for_the_others[unet-richest]
    planner/test_cycles.py::test_a_frontiers_ways_are_all_in_the_compilers_seconds
    planner/test_cycles.py::test_a_plan_by_the_compilers_seconds_fits_and_tells_them[False]
    planner/test_cycles.py::test_stretches_add_up_to_the_whole_step_where_the_roofline_does_not
    planner/test_equinox.py::test_autocheckpoint_plans_for_equinoxs_own_gradient[eager-with_aux-True]
    planner/test_equinox.py::test_autocheckpoint_plans_for_equinoxs_own_gradient[jit-filter_value_and_grad-False]
    planner/test_equinox.py::test_numbers_that_branches_ask_for_are_no_arguments_of_the_plan[False-True]
    planner/test_equinox.py::test_numbers_that_branches_ask_for_are_no_arguments_of_the_plan[True-False]
    planner/test_equinox.py::test_numbers_that_branches_ask_for_are_no_arguments_of_the_plan[True-True]
    planner/test_floor.py::test_a_long_run_of_cheap_operations_is_cut[400-30%]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[a loop-each]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[a loop-every two]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[branches-each]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[branches-every two]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[residual-every two]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[unrolled-each]
    planner/test_floor.py::test_a_plan_fits_where_a_person_gets_at_no_more_work[unrolled-every two]
    planner/test_floor.py::test_a_plan_fits_where_a_preset_gets_at_no_more_work[branches-everything-cuda:h100]
    planner/test_floor.py::test_a_plan_fits_where_a_preset_gets_at_no_more_work[residual-dots-cpu]
    planner/test_floor.py::test_a_plan_fits_where_a_preset_gets_at_no_more_work[residual-hybrid-cpu]
    planner/test_floor.py::test_a_plan_fits_where_a_preset_gets_at_no_more_work[residual-nothing-cuda:h100]
    planner/test_floor.py::test_in_a_small_program_what_the_chain_misjudges_is_tried[2]
    planner/test_floor.py::test_in_a_small_program_what_the_chain_misjudges_is_tried[4]
    planner/test_floor.py::test_more_memory_never_costs_more[branches]
    planner/test_floor.py::test_more_memory_never_costs_more[unrolled]
    planner/test_floor.py::test_what_a_preset_keeps_of_each_block_is_one_of_the_ways_that_plans_are_held_against[dots_no_batch]
    planner/test_floor.py::test_what_a_preset_keeps_of_each_block_is_one_of_the_ways_that_plans_are_held_against[hybrid]
    planner/test_floor.py::test_what_is_said_to_be_the_least_fits_and_no_plan_is_below_it[a loop]
    planner/test_floor.py::test_what_is_said_to_be_the_least_fits_and_no_plan_is_below_it[branches]
    planner/test_floor.py::test_what_is_said_to_be_the_least_fits_and_no_plan_is_below_it[unrolled]
    planner/test_host.py::test_a_plan_with_moved_values_trains_as_the_function_does
    planner/test_host.py::test_a_tpu_moves_to_the_host_beside_other_work
    planner/test_inside.py::test_a_mapped_function_that_is_not_most_is_planned_where_nothing_else_fits
    planner/test_inside.py::test_a_plan_lies_in_the_body_fits_and_recomputes_less_than_each_block[unrolled-mapped in a mapped one]
    planner/test_inside.py::test_a_plan_lies_in_the_body_fits_and_recomputes_less_than_each_block[unrolled-mapped]
    planner/test_inside.py::test_autocheckpoint_plans_what_is_mapped_too
    planner/test_inside.py::test_blocks_that_gather_their_weights_from_eight_devices_are_planned[explicit]
    planner/test_inside.py::test_of_plain_arrays_what_one_device_holds_counts_too
    planner/test_inside.py::test_two_mapped_functions_of_one_size_stay_whole
    planner/test_least_tiles.py::test_a_plan_with_tiles_for_one_budget_is_one_for_every_larger_budget
    planner/test_least_tiles.py::test_from_the_least_upwards_every_budget_has_a_plan[attention-args1-shares1]
    planner/test_meshes.py::test_plans_keep_the_layout_that_is_part_of_an_arguments_type[auto]
    planner/test_meshes.py::test_plans_keep_the_layout_that_is_part_of_an_arguments_type[set_mesh]
    planner/test_scale.py::test_a_long_stretch_without_matmuls_is_cut_into_equal_stages_of_few_operations
    planner/test_search.py::test_a_plan_that_the_compiler_refuses_is_not_returned[None]
    planner/test_search.py::test_complex_values_are_planned_for
    planner/test_search.py::test_on_an_h100_that_is_not_here_a_plan_beats_a_checkpoint_around_each_block
    planner/test_search.py::test_planned_gradients_equal_the_unplanned_ones[gpt dropout]
    planner/test_search.py::test_planned_gradients_equal_the_unplanned_ones[lstm]
    planner/test_search.py::test_planned_gradients_equal_the_unplanned_ones[moe]
    planner/test_search.py::test_planned_gradients_equal_the_unplanned_ones[resnet]
    planner/test_search.py::test_planned_gradients_equal_the_unplanned_ones[unet]
    planner/test_search.py::test_the_compiled_peak_is_within_the_budget_and_recomputation_buys_it[50]
    planner/test_search.py::test_the_compiled_peak_is_within_the_budget_and_recomputation_buys_it[90]
    planner/test_search.py::test_the_stage_that_needs_most_is_cut_again_where_no_neck_is
    planner/test_shards.py::test_a_sharded_scan_is_planned_per_device
    planner/test_tiles.py::test_a_frontier_has_plans_with_tiles_too
    planner/test_tiles.py::test_a_head_that_stands_out_is_tiled_alone
    planner/test_tiles.py::test_all_that_has_the_axis_is_tiled_with_the_value_that_it_is_followed_from
    planner/test_tiles.py::test_arguments_that_are_no_arrays_checkpoints_and_autocheckpoint
    planner/test_tiles.py::test_functions_with_loops_rules_and_norms_of_each_example[_scanned-shapes1]
    planner/test_tiles.py::test_the_peak_falls_and_the_time_grows_with_less_budget
    planner/test_tiles.py::test_what_is_sharded_is_tiled_within_the_shards[tpu:v5e:2x2]
    test_examples.py::test_a_plan_changes_the_memory_and_not_the_losses[resnet_digits]
    test_examples.py::test_a_plan_changes_the_memory_and_not_the_losses[unet_scenes]
    test_examples.py::test_compare_writes_a_table_and_a_picture
    test_templates.py::test_a_template_trains_within_its_budget_with_the_same_losses[equinox]
    test_templates.py::test_a_template_trains_within_its_budget_with_the_same_losses[nnx]
    transforms/test_scan.py::test_every_schedule_keeps_what_it_should_and_no_more[v5e]
    transforms/test_scan_budget.py::test_a_budget_holds_on_the_cpu_which_computes_16_bit_floats_in_float32[elementwise-b-bfloat16]
    transforms/test_scan_budget.py::test_a_budget_holds_on_the_cpu_which_computes_16_bit_floats_in_float32[mlp-w-float16]
    transforms/test_scan_budget.py::test_a_budget_holds_on_the_cpu_which_computes_16_bit_floats_in_float32[normed-w-float16]
    transforms/test_scan_budget.py::test_a_budget_holds_on_the_cpu_which_computes_16_bit_floats_in_float32[rnn-w-bfloat16]
    transforms/test_scan_budget.py::test_a_budget_holds_on_the_cpu_which_computes_16_bit_floats_in_float32[with_rows-w-float16]
    transforms/test_scan_gathers.py::test_a_constant_that_a_step_uses_a_thousand_times
    transforms/test_scan_guide.py::test_the_example_trains_alike_in_less_resident_memory
    transforms/test_scan_sharded.py::test_gradients_and_layouts_over_four_devices_are_those_of_lax_scan[explicit]
    transforms/test_scan_sharded.py::test_gradients_and_layouts_over_four_devices_are_those_of_lax_scan[shard_map]
    transforms/test_tile_random.py::test_functions_that_may_couple_are_equal_or_refused[300]
    transforms/test_tile_random.py::test_functions_that_the_axis_goes_through[300]
    transforms/test_tile_sharded.py::test_each_device_computes_its_part_of_every_tile[a loss-tpu:v5e:2x2]
""")
"""Tests that take minutes, and ask of a larger program, or of one more, what others ask: they are marked `long`."""

FIRST = ["test_templates.py", "transforms/test_tile_random.py"]
"""Files of tests that take minutes each: they run first, so that no worker is left with one at the end."""

EACH = ["compat", "transforms/test_tile_operations.py::test_an_operation_in_tiles_is_what_it_is_without_them"]
"""Folders and tests whose parameters are parts of JAX: none of these is marked `once` because it is not the first."""

_CHECKED: dict[str, str | None] = {}


def _missing(name: str) -> str | None:
    """Why a target cannot be compiled for here, or None."""
    from jaxckpt._errors import MissingTargetError
    from jaxckpt.memory.targets import Target

    if name not in _CHECKED:
        try:
            assert Target(name).devices
            _CHECKED[name] = None
        except MissingTargetError as error:
            _CHECKED[name] = str(error)
    return _CHECKED[name]


HERE = pathlib.Path(__file__).parent


def _name(path: pathlib.Path, test: str = "") -> str:
    """A file, or one of its tests, as the lists above name it; nothing if it is not in this folder."""
    inside = path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
    return f"{inside}::{test}" if inside and test else inside


def _is_in(name: str, places: list[str]) -> bool:
    """Whether a list has a test, the test for all its parameters, its file, or a folder of it."""
    return any(name == each or name.startswith((f"{each}/", f"{each}::", f"{each}[")) for each in places)


def pytest_ignore_collect(collection_path: pathlib.Path, config: pytest.Config) -> bool | None:
    """Does not import files whose tests `-m "not compile..."` would all leave out."""
    chosen = config.option.markexpr or ""
    quick = chosen == "not compile" or chosen.startswith("not compile and ")
    if quick and " or " not in chosen and collection_path.suffix == ".py" and not collection_path.name.startswith("_"):
        return None if collection_path.name == "conftest.py" or _is_in(_name(collection_path), TRACING) else True
    return None


def _check_lists(config: pytest.Config, names: set[str]) -> None:
    """Fails if a list above names a file or a test that does not exist (any more)."""
    files = {name.partition("::")[0] for name in names}
    whole = not any("::" in each for each in config.args)  # all tests of the files are there
    for each in (*TRACING, *ONCE, *LONG, *FIRST):
        file, _, test = each.partition("::")
        is_there = not (test and whole and file in files) or any(_is_in(name, [each]) for name in names)
        assert (HERE / file).exists() and is_there, f"A list in tests/conftest.py names {each}; there is none."


def _later(names: Mapping[pytest.Item, str]) -> set[pytest.Item]:
    """Returns, of tests with parameters, all but the first for each target that is in neither of the lists `ONCE` and
    `LONG`.
    """
    seen: set[tuple[Any, ...]] = set()
    found = set()
    for item, name in names.items():
        test, _, parameters = name.partition("[")
        if not parameters or _is_in(name, [*ONCE, *LONG, *EACH]):
            continue
        kind = test, *(item.get_closest_marker(each) is not None for each in ("cuda", "tpu", "gpu"))
        if kind in seen:
            found.add(item)
        seen.add(kind)
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Puts each test into its tier: `compile`, `target`, or neither, the quick one. Marks `once` and `long`.

    Of a test that compiles and has parameters, all but the first for each target are marked `once`: a new version of
    JAX breaks a test with all of them, or with few.
    """
    names = {item: _name(item.path, item.name) for item in items}
    _check_lists(config, set(names.values()))
    items.sort(key=lambda item: not _is_in(names[item], FIRST))
    later = _later(names)
    for item, name in names.items():
        if any(item.get_closest_marker(each) for each in ("cuda", "tpu", "gpu")):
            item.add_marker("target")
        if not _is_in(name, TRACING):
            item.add_marker("compile")
        if _is_in(name, ONCE) or (item.get_closest_marker("compile") and item in later):
            item.add_marker("once")
        if _is_in(name, LONG):
            item.add_marker("long")


class _Named:
    """Names a failed test at once, so that a run that is cut off has said which failed."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid} ({report.when})")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Named(config))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Each worker takes half of the tests in their order, so that tests of one file share what they cache, and then
    from the other's.
    """
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_collection_finish() -> None:
    """Python looks for garbage less often, and not among what the imports made: that takes an eighth of the time."""
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    """JAX keeps what it has traced and compiled: some gigabytes over all tests."""
    yield
    jax.clear_caches()
    gc.collect()


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder of compilers' answers for this run of pytest, one for all of its workers."""
    folder = tmp_path_factory.getbasetemp()
    return (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "answers"


@pytest.fixture
def shared_answers(answers: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are not about compiling: a program that another such test has compiled is not compiled again. What
    plans another test found is not known.
    """
    from jaxckpt.planner.remembered import Remembered

    monkeypatch.setenv("JAXCKPT_CACHE_DIR", str(answers))
    monkeypatch.setattr(Remembered, "plans", lambda self: [])


@pytest.fixture
def optimised(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests whose programs run for seconds, here or in a process that they start: LLVM optimises them, as it does
    for users.
    """
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "0")
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, target in (("cuda", "cuda:h100"), ("tpu", "tpu:v5e:2x2")):
        if item.get_closest_marker(marker) and (reason := _missing(target)):
            if os.environ.get("JAXCKPT_REQUIRE_TARGETS") == "1":
                pytest.fail(f"{target} must be tested here: {reason}")
            pytest.skip(reason)
    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU and JAX_PLATFORMS=cuda")
