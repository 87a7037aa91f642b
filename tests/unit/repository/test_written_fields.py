"""Names of fields in files, checkpoints, caches, hashes or other programs: no rename changes them.

Lines of metrics and events are in docs/files.md, settings in docs/settings.md, each with a test.
"""

import dataclasses
import importlib

import pytest

WRITTEN = {
    "checkpoint.state.Evals": "first last best since_best chosen",
    "checkpoint.state.RunState": (
        "step total_steps model_identity loader layout micro_size config eval_loss evals governor "
        "model_sample experts held_out start scaled_for"
    ),
    "data.counts.Counters": (
        "examples documents tokens loss_tokens truncated split unclear_answers unended_answers "
        "ended_by_next empty_answers marked_answers unmarked_answers lost_reasoning "
        "written_reasoning joined_starts lost_calls lost_tools unended_texts null_contents "
        "own_controls control_texts bad_rows control_tokens cut_prompts cut_others unpaired "
        "unmatched weighted cut_tokens cut_lengths left_out other_answers dropped"
    ),
    "data.counts.ReadFindings": "num_bad first_bad read_as used unread num_elsewhere num_marked",
    "data.hdf5_format.Attributes": (
        "content tokenizer tokenizer_fingerprint vocab_size highest_token seq_len loss_on "
        "template_date source counters hpc_tune_version form"
    ),
    "data.order.MixturePhase": "parts first_row first_epoch",
    "data.order.MixtureSource": ("content limit num_rows learned_tokens weight epochs rows_before"),
    "data.order.SourceProgress": (
        "name asked rows learned_tokens share passes rows_per_pass learned_per_pass"
    ),
    "data.prepare.PrepareSettings": "seq_len loss_on reading",
    "data.reading.ReadOptions": "columns bad_rows held_out part form",
    "memory.device.DeviceSample": (
        "used_bytes limit_bytes allocated_bytes reserved_bytes others_bytes retries ooms"
    ),
    "memory.monitor.MemorySample": (
        "host_bytes host_limit_bytes ranks_bytes own_bytes swap_bytes shm_bytes stalled device"
    ),
    "memory.monitor.MemoryShortage": "need had phase rank host words memory",
    "model.regions.WrittenFile": "name num_bytes sha256",
    "plan.report.MemoryPlan": (
        "model layout why micro_rows seq_len machine trace phases tokens_that_fit remedies bound_by"
    ),
    "plan.step_time.ComputeTimes": (
        "block_s head_s update_s unshard_s sync_s sharing overlaps host_copy_s"
    ),
    "plan.trace.TraceReport": (
        "layout world_size rank num_layers num_micro reshard weight_bytes adapter_bytes "
        "gradient_bytes optimizer_bytes activation_bytes peak_bytes evaluation_bytes loaded_bytes "
        "idle_bytes heap_peak_bytes heap_evaluation_bytes trace_s kernel_bytes shards parts "
        "moved_bytes row_pieces"
    ),
    "probe.facts.RankFacts": (
        "rank node local_rank hostname launcher cpus num_reachable numa_nodes threads "
        "device_wanted device device_uuid device_bytes device_numa versions mpi cuda nccl "
        "compiled host_limit_bytes host_limit_source host_used_bytes memlock_bytes open_files "
        "shm_bytes shm_free_bytes topology folders taken rocm library clock_s unused hidden "
        "device_place products lacks_attention"
    ),
    "probe.findings.Finding": "level text",
    "probe.links.CollectiveTime": "name num_bytes seconds bytes_per_s",
    "probe.links.Link": "ranks nodes latency_s bytes_per_s exchange_bytes_per_s",
    "probe.links.Links": "pairs collectives skipped lanes order",
    "report.read.JobsEnergy": "joules words",
    "rundir.outcome.Heartbeat": "time phase host used limit limit_source cgroup oom_kills",
    "rundir.outcome.Outcome": "status reason step exit_code facts",
    "rundir.owner.Owner": "nonce host pid start place folder job restart since_s",
    "step.layout.Layout": "replicate shard tensor pipeline expert context",
    "supervise.StartRecord": (
        "from_step to_step status reason exit_code asked job nodes left_out missing lost_nodes "
        "error"
    ),
    "train.startup.architecture_check.ArchitectureCheck": (
        "loss attention kernel packing pipeline tensor context adapters untrained score"
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_fields_that_are_written_keep_their_names(name):
    module, _, written_class = name.rpartition(".")
    fields = dataclasses.fields(
        getattr(importlib.import_module(f"hpc_tune.{module}"), written_class)
    )
    assert [field.name for field in fields] == WRITTEN[name].split()
