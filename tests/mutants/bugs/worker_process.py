"""Bugs in the draft that runs in a process of its own."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "messages of an older job reach a newer one",
        "drafting/parallel/process.py",
        within="Worker.receive",
        find="$job == self._job_number",
        plant="$job <= self._job_number",
        tests=("engine/test_parallel_failures.py::test_a_message_of_an_older_job_is_not_returned",),
    ),
    PlantedBug(
        "tokens that continue a rejected chain are kept",
        "drafting/parallel/worker_drafter.py",
        find="""
            if $epoch >= $draft.valid_from:
                ...
        """,
        plant="""
            if $epoch >= 0:
                ...
        """,
        tests=("engine/test_parallel_failures.py::test_every_token_in_flight_is_the_drafts_own",),
    ),
    PlantedBug(
        "a worker process is returned once for each close of its answer",
        "drafting/parallel/process.py",
        find="self._finalizer.detach() is not None",
        plant="self._finalizer.detach() is not None or True",
        tests=("engine/test_abandoned.py::test_a_lending_ends_once_and_for_all",),
    ),
    PlantedBug(
        "a worker process outlives its parent",
        "drafting/parallel/child.py",
        find="os.getppid() == $parent",
        plant="True",
        tests=("engine/test_abandoned.py::test_a_worker_ends_with_its_parent[60.0]",),
    ),
    PlantedBug(
        "closing an answer does not wait until its draft has stopped",
        "drafting/parallel/process.py",
        within="Worker.stop",
        find="""
            while $patience:
                ...
        """,
        plant="""
            while False:
                ...
        """,
        tests=("engine/test_abandoned.py::test_a_closed_answer_leaves_no_draft_at_work",),
    ),
    PlantedBug(
        "two tensors of one message are taken for the same storage",
        "drafting/parallel/channel.py",
        find="len(self.storages), self.size",
        plant="self.size, self.size",
        tests=("drafting/test_channel.py::test_tensors_arrive_as_they_were",),
    ),
    PlantedBug(
        "a worker process that fails does not hand over its sampled tokens",
        "drafting/parallel/worker_drafter.py",
        within="WorkerDrafter._raise_if_failed",
        find="DraftFailed($chains)",
        plant="DraftFailed({})",
        tests=("laws/test_failing_workers.py",),
    ),
    PlantedBug(
        "a worker process computes with a token before it publishes it",
        "drafting/parallel/child.py",
        find="""
            self._publish($request, $draft, $longer)
            $draft.chain = $longer
        """,
        plant="""
            $draft.chain = $longer
            self._session.score({$request: $longer})
            self._publish($request, $draft, $longer)
        """,
        tests=("laws/test_failing_workers.py",),
    ),
    PlantedBug(
        "the reader of a stream keeps the target's number of threads",
        "drafting/parallel/worker_drafter.py",
        find="torch.get_num_threads() != $before",
        plant="False",
        tests=("engine/test_abandoned.py::test_the_threads_between_two_rounds_are_the_callers",),
    ),
    PlantedBug(
        "a draft in a worker process repeats its noise after a rejection",
        "drafting/parallel/child.py",
        find="$draft.start = $draft.answer_tokens",
        plant="$draft.start = 0",
        tests=("laws/test_registered.py::test_no_noise_is_used_for_two_draws",),
    ),
    PlantedBug(
        "the size of a worker's first batch depends on its speed",
        "drafting/parallel/worker_drafter.py",
        find="self._length if self._samples else len($draft.chain)",
        plant="len($draft.chain)",
        tests=(
            "laws/test_registered.py::"
            "test_a_parallel_draft_of_any_speed_gives_the_same_rows_and_tokens",
        ),
    ),
    PlantedBug(
        "a draft that began before the first token waits as long as one that did not",
        "drafting/parallel/worker_drafter.py",
        within="WorkerDrafter.commit",
        find="$draft.next_proposal_length is None",
        plant="False",
        tests=(
            "methods/test_hippo_schedule.py::test_the_head_start_is_as_long_as_the_targets_prefill",
        ),
    ),
    PlantedBug(
        "a paused draft in a worker process never goes on",
        "drafting/parallel/child.py",
        within="JobRunner.commit",
        find="$draft.paused = $draft.paused and len($draft.chain) > 0",
        plant="pass",
        tests=("methods/test_sixth_method.py::test_it_answers_as_the_target_alone",),
    ),
    PlantedBug(
        "what a draft's process computes is taken for other programs",
        "core/free_cores.py",
        within="CpuSample.now",
        find="$own + own_processes.running_seconds()",
        plant="$own",
        tests=("core/test_free_cores.py::test_time_of_a_process_that_saccade_started_is_its_own",),
    ),
    PlantedBug(
        "a draft's process is not counted as our own",
        "drafting/parallel/process.py",
        find="count_as_own(self.process)",
        plant="None",
        tests=("engine/test_parallel.py::test_the_workers_time_is_not_that_of_other_programs",),
    ),
)
