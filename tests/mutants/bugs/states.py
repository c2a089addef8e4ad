"""Bugs in layers that have a state instead of keys, and in layers with a window."""

from bugs.bug import PlantedBug

RECURRENT = "model/test_recurrent.py"
HYBRIDS = "families/test_hybrid_models.py"
WINDOWED = "engine/test_windowed_memory.py"
CAPTURED = "model/test_captured_recurrent.py"

BUGS = (
    PlantedBug(
        "the state of a rejected node is kept",
        "model/recurrent.py",
        find="$journal.path[:$count]",
        plant="tuple(range($journal.path[$count - 1] + 1))",
        tests=(f"{RECURRENT}::test_any_history_of_a_hybrid_equals_the_oracle",),
    ),
    PlantedBug(
        "a node's convolution reads the inputs one place too early",
        "model/recurrent.py",
        find="torch.where($is_on_path, $places, -1).sort(1).values[:, -$past - 1 :]",
        plant="torch.where($is_on_path, $places, -1).sort(1).values[:, -$past - 2 : -1]",
        tests=(f"{RECURRENT}::test_a_convolution_reads_the_last_inputs_of_a_path",),
    ),
    PlantedBug(
        "the window after text is one input old",
        "model/recurrent.py",
        find="$text[len($text) - $past :]",
        plant="$text[len($text) - $past - 1 : -1]",
        tests=(f"{RECURRENT}::test_a_layer_is_its_own_module_along_every_path",),
    ),
    PlantedBug(
        "the window after an accepted path is one input old",
        "model/recurrent.py",
        within="Updates.apply",
        find="$window[..., -$past:, :]",
        plant="$window[..., -$past - 1 : -1, :]",
        tests=(f"{RECURRENT}::test_a_convolution_reads_the_last_inputs_of_a_path",),
    ),
    PlantedBug(
        "the decay of what is left of a chain still begins before its accepted part",
        "model/recurrent.py",
        find="self.total_decay[..., $start:] - $passed",
        plant="self.total_decay[..., $start:] - 0 * $passed",
        tests=(f"{RECURRENT}::test_what_follows_an_accepted_part_of_a_chain_stays_scored",),
    ),
    PlantedBug(
        "a new node's decay begins at the root and not at its scored ancestor",
        "model/recurrent.py",
        within="score_tree",
        find="$total = $total + $before",
        plant="$total = $total + 0 * $before",
        tests=(f"{RECURRENT}::test_a_row_of_a_tree_reads_its_own_path_alone",),
    ),
    PlantedBug(
        "a snapshot is of another length than its states",
        "model/recurrent.py",
        find="self._snapshots[self.length] = $states",
        plant="self._snapshots[self.length - 1] = $states",
        tests=(f"{RECURRENT}::test_states_of_an_accepted_path_and_of_snapshots_can_be_had_again",),
    ),
    PlantedBug(
        "the states at the end of the pictures are forgotten",
        "model/recurrent.py",
        within="LayerStates.snapshot",
        find="$length not in $spared",
        plant="$length",
        tests=(f"{RECURRENT}::test_a_text_is_never_cut_back_to_before_a_picture",),
    ),
    PlantedBug(
        "a shared prefix is reused to where no state is known",
        "model/prefix_cache.py",
        find="$best.cache.nearest_length(min($best_rows, $max_rows))",
        plant="min($best_rows, $max_rows)",
        tests=(f"{HYBRIDS}::test_a_prompt_that_shares_half_of_another_is_right",),
    ),
    PlantedBug(
        "a turn cuts a text back to where no state is known",
        "model/session.py",
        find="$request.cache.nearest_length($request.prompt_rows[0] + $cached)",
        plant="$request.prompt_rows[0] + $cached",
        tests=(f"{HYBRIDS}::test_every_turn_of_a_hybrid_answers_as_a_fresh_start",),
    ),
    PlantedBug(
        "a fork needs the states that it had before the rows it computed itself",
        "model/cache.py",
        find="self.length = at",
        plant="self.truncate(at)",
        tests=(f"{RECURRENT}::test_a_fork_goes_on_after_a_turn_right_behind_a_score",),
    ),
    PlantedBug(
        "exact is promised for a model with states",
        "model/batch_invariant.py",
        find="if $model.mixers:\n    ...",
        plant="if not $model:\n    ...",
        tests=(f"{HYBRIDS}::test_exact_is_refused_by_name",),
    ),
    PlantedBug(
        "captured steps: a step starts from the state of the first one",
        "model/captured_recurrent.py",
        within="StaticStates.fill",
        find="$filled() is $states",
        plant="$filled() is not None",
        tests=(f"{CAPTURED}::test_every_step_gives_the_laws_of_an_ordinary_forward",),
    ),
    PlantedBug(
        "captured steps: the decay of nodes begins before the rows that the step commits",
        "model/captured_recurrent.py",
        find="$own.total_decay - $passed",
        plant="$own.total_decay - 0 * $passed",
        tests=(f"{CAPTURED}::test_every_step_gives_the_laws_of_an_ordinary_forward",),
    ),
    PlantedBug(
        "captured steps: the window before the nodes leaves the committed rows out",
        "model/captured_recurrent.py",
        find="[*range($past), *$committed][$count:]",
        plant="[*range($past), *$committed][: $past]",
        tests=(f"{CAPTURED}::test_every_step_gives_the_laws_of_an_ordinary_forward",),
    ),
    PlantedBug(
        "captured steps: the states of a trial stay in the request",
        "model/captured_recurrent.py",
        find="$cache.states.restored()",
        plant="$cache.states.copy().restored()",
        tests=(f"{CAPTURED}::test_a_trial_changes_no_state",),
    ),
    PlantedBug(
        "captured steps: requests that share a step read the first one's inputs",
        "model/captured_recurrent.py",
        find="$first + find_taps($ancestors[$request], $past)",
        plant="0 * $first + find_taps($ancestors[$request], $past)",
        tests=(f"{CAPTURED}::test_requests_share_a_step_and_nothing_else",),
    ),
    PlantedBug(
        "a window is one key too wide",
        "model/window_rule.py",
        find="$rows - $keys < self.size",
        plant="$rows - $keys <= self.size",
        tests=("model/test_windowed_attention.py::test_each_row_sees_what_its_own_text_would_see",),
    ),
    PlantedBug(
        "pictures are read from left to right",
        "model/windowed_attention.py",
        find="$reach[:, None] == $reach",
        plant="$reach[:, None] < 0",
        tests=("model/test_windowed_attention.py::test_each_row_sees_what_its_own_text_would_see",),
    ),
    PlantedBug(
        "a prompt without a mask is always read from left to right",
        "model/prompt_reader.py",
        find="_is_bidirectional($text)",
        plant="False",
        tests=(
            "model/test_windowed_attention.py::"
            "test_a_prompt_that_is_read_in_both_directions_is_read_again_when_it_goes_on",
        ),
    ),
    PlantedBug(
        "a turn goes on from keys that have not seen its words",
        "engine/request_batch.py",
        find="any($prompt.changes_with_more_text for $prompt in self.prompts)",
        plant="False",
        tests=(
            "model/test_windowed_attention.py::"
            "test_a_prompt_that_is_read_in_both_directions_is_read_again_when_it_goes_on",
        ),
    ),
    PlantedBug(
        "rows of a pruned picture do not see each other",
        "core/prompt.py",
        within="Prompt._last_visible_among",
        find="last[groups]",
        plant="places",
        tests=(
            "model/test_windowed_attention.py::test_a_pruned_prompt_keeps_which_rows_see_each_other",
        ),
    ),
    PlantedBug(
        "a key behind a window is let go one row too early",
        "model/window_rule.py",
        find="$row - self.size + 1",
        plant="$row - self.size + 2",
        tests=(f"{WINDOWED}::test_the_keys_that_a_row_sees_are_held",),
    ),
    PlantedBug(
        "a text is cut back to where its keys were let go",
        "model/cache.py",
        within="Cache._nearest_with_keys",
        find="$length >= self._first_length",
        plant="$length >= 0",
        tests=(f"{WINDOWED}::test_every_turn_answers_as_a_fresh_start",),
    ),
    PlantedBug(
        "accepted nodes move as if no key had been let go",
        "model/cache.py",
        find="send_to_device(rows - $first, $device)",
        plant="send_to_device(rows, $device)",
        tests=(f"{WINDOWED}::test_memory_stays_flat_over_a_long_answer",),
    ),
)
