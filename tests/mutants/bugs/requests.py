"""Bugs in what handles requests and files: engine, server, inputs, benchmarks."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "calibrate: a rounding that is refused ends the search",
        "bench/calibration.py",
        within="propose_rounding",
        find="""
            try:
                $rounded = $making
            except ModelError:
                continue
        """,
        plant="""
            try:
                $rounded = $making
            except ModelError:
                return calibration
        """,
        tests=("bench/test_calibrate.py::test_a_rounding_that_is_refused_leaves_the_others",),
    ),
    PlantedBug(
        "digests: numbers that stand side by side run into each other",
        "model/prefix_cache.py",
        within="_add_to_digest",
        find="_add_to_digest($hasher, repr($value).encode(), $tensor_digest)",
        plant="$hasher.update(repr($value).encode())",
        tests=("engine/test_prefix_cache.py::test_digests_tell_contents_apart",),
    ),
    PlantedBug(
        "any colour over the background counts as one that the pair was trained on",
        "inputs/training_domain.py",
        find="abs(red - green) <= self.pixel_error",
        plant="abs(red - green) <= 255",
        tests=(
            "world/test_training_domain.py::test_other_frames_are_not_taken_for_the_drawn_world",
        ),
    ),
    PlantedBug(
        "generated tokens' penalties count the prompt",
        "core/sampling.py",
        find="ids[:, self.prompt_length :]",
        plant="ids",
        tests=("laws/test_penalties.py::test_the_formula_is_openais",),
    ),
    PlantedBug(
        "generated tokens' penalties: presence counts every time",
        "core/sampling.py",
        find="self.presence * (counts > 0)",
        plant="self.presence * counts",
        tests=("laws/test_penalties.py::test_the_formula_is_openais",),
    ),
    PlantedBug(
        "reasoning that the prompt opens is taken for the answer",
        "serve/formats/reasoning.py",
        find="$end.endswith(self.opening)",
        plant="False",
        tests=("serve/test_reasoning.py::test_marks_come_from_the_tokenizer_or_the_template",),
    ),
    PlantedBug(
        "a form holds the reasoning before it too",
        "serve/formats/reasoning.py",
        find="self.grammar(answer[$end + 1 :])",
        plant="self.grammar(answer)",
        tests=("serve/test_reasoning.py::test_a_form_follows_the_reasoning",),
    ),
    PlantedBug(
        "a step on a GPU costs its bytes and no fixed time",
        "bench/hardware/pair_fit.py",
        find="self.step + self.fixed",
        plant="self.step",
        tests=("bench/test_doctor.py::test_a_layer_costs_a_fixed_time_on_a_gpu",),
    ),
    PlantedBug(
        "no warning that a parallel method gains nothing on one GPU",
        "engine/request_batch.py",
        find="$draft.device.type == 'cuda' and $draft.device == self.target.device",
        plant="False",
        tests=("gpu/test_warnings_on_gpu.py::test_pointless_choices_are_named",),
    ),
    PlantedBug(
        "CUDA graphs: capturing counts in the seconds of a round",
        "core/timing.py",
        within="now",
        find="_stopped.seconds",
        plant="0.0",
        tests=("model/test_cuda_graphs.py::test_captures_are_in_no_rounds_seconds",),
    ),
    PlantedBug(
        "a stopped clock runs on until its block ends",
        "core/timing.py",
        within="now",
        find="_stopped.start if _stopped.depth else time.perf_counter()",
        plant="time.perf_counter()",
        tests=("core/test_timing.py::test_a_stopped_clock_stands_still",),
    ),
    PlantedBug(
        "a template's own text is taken for a mark",
        "inputs/literal_text.py",
        within="_extract",
        find="repr($turns) + $unmarked",
        plant="repr($turns)",
        tests=("families/test_family_hostile_text.py::test_marks_in_what_the_template_writes",),
    ),
    PlantedBug(
        "a batch of items has one captioner for all media",
        "bench/runner.py",
        within="_BatchRun._captioner",
        find="$run.captioner_for(turn=0)",
        plant="self.item_runs[0].captioner_for(turn=0)",
        tests=("bench/test_bench_runner.py::test_items_of_one_batch_have_captions_of_their_own",),
    ),
    PlantedBug(
        "a file of measurements is never read again after a change",
        "core/home.py",
        find="_read($path, $state.st_ino, $state.st_mtime_ns, $state.st_size)",
        plant="_read($path)",
        tests=("core/test_home.py::test_what_others_remember_is_seen_and_a_file_is_read_once",),
    ),
    PlantedBug(
        "values that change often are only written when the process ends",
        "core/home.py",
        within="MeasurementFile.save_later",
        find="time.monotonic() - $self._last_write >= WRITE_EVERY_SECONDS",
        plant="False",
        tests=("core/test_home.py::test_values_that_change_often_are_written_seldom",),
    ),
    PlantedBug(
        "the draft does not get the first token of the answer",
        "engine/request_batch.py",
        find="self.drafter.commit({$request: $opened[$request].emitted for $request in $staying})",
        plant="None",
        tests=("engine/test_greedy.py::test_a_target_drafting_for_itself_accepts_everything",),
    ),
    PlantedBug(
        "costs: the expected length leaves out the bonus token",
        "core/round_estimates.py",
        within="expected_chain",
        find="range($length + 1)",
        plant="range(1, $length + 1)",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_expected_chain_is_the_geometric_sum_of_the_paper",
        ),
    ),
    PlantedBug(
        "fit: old rounds count as much as new ones",
        "core/round_estimates.py",
        find="FadingMean(self.total * $memory + $total, self.weight * $memory + $weight)",
        plant="FadingMean(self.total + $total, self.weight + $weight)",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_fit_folds_the_rate_towards_what_it_sees_and_forgets",
        ),
    ),
    PlantedBug(
        "fit: a cost that was once high never falls again",
        "core/round_estimates.py",
        find="max($here, $each - EXTRA_COST_DECAY * ($each - $here))",
        plant="max($here, $each)",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_costs_of_a_busy_moment_fade_within_an_answer",
        ),
    ),
    PlantedBug(
        "scheduler: a short prompt costs its newcomer a round",
        "engine/scheduler.py",
        find="min(1.0, len($batch.request.ids[0]) / $batch.session.chunk)",
        plant="1.0",
        tests=(
            "engine/test_scheduler.py::test_short_prompts_are_read_together_as_far_as_a_chunk_goes",
        ),
    ),
    PlantedBug(
        "scheduler: newcomers hold up those who decode",
        "engine/scheduler.py",
        find="min(1.0, len($batch.request.ids[0]) / $batch.session.chunk)",
        plant="0.0",
        tests=(
            "engine/test_scheduler.py::test_short_prompts_are_read_together_as_far_as_a_chunk_goes",
        ),
    ),
    PlantedBug(
        "scheduler: who came first takes part in every round",
        "engine/scheduler.py",
        find="self._entries[$number] = self._entries.pop($number)",
        plant="pass",
        tests=("engine/test_scheduler.py::test_rounds_of_a_few_are_taken_in_turns",),
    ),
    PlantedBug(
        "round size: rounds are made short even where that is expensive",
        "engine/requests_per_round.py",
        find="round($live / max(1, $cheap, ($patience - $fixed) / $each))",
        plant="round($live / max(1, ($patience - $fixed) / $each))",
        tests=(
            "engine/test_requests_per_round.py::"
            "test_a_round_is_as_short_as_is_cheap_and_no_shorter_than_anybody_waits",
        ),
    ),
    PlantedBug(
        "round size: rounds of few requests decide about rounds of many",
        "engine/requests_per_round.py",
        find="$live > max(self.seconds, default=0)",
        plant="not self.seconds",
        tests=("engine/test_requests_per_round.py::test_more_than_ever_are_tried_together",),
    ),
    PlantedBug(
        "round size: only the last round's time counts",
        "core/round_estimates.py",
        within="SecondsBySize.fold",
        find="$old + NEW_ROUND_WEIGHT * ($seconds - $old)",
        plant="$seconds",
        tests=("engine/test_requests_per_round.py::test_what_rounds_took_lately_counts",),
    ),
    PlantedBug(
        "once: the key is the last argument only",
        "core/once.py",
        within="once.work_once",
        find="*$path, $last = $arguments",
        plant="*$path, $last = $arguments[-1:]",
        tests=(
            "core/test_once.py::test_every_row_of_objects_has_an_answer_of_its_own_worked_out_once",
        ),
    ),
    PlantedBug(
        "grammars: the parser counts tokens that it rejected as read",
        "serve/formats/grammar.py",
        within="Grammar._move_parser",
        find="$answer[:$same + $consumed]",
        plant="$answer",
        tests=("serve/test_formats.py::test_a_grammar_is_a_function_of_the_answer",),
    ),
    PlantedBug(
        "documents: padding counts in the places of a document",
        "engine/request.py",
        find="real[row].nonzero().squeeze(-1)",
        plant="torch.arange(ids.shape[1])",
        tests=(
            "engine/test_documents.py::"
            "test_spans_of_a_padded_batch_count_from_each_prompts_own_beginning",
        ),
    ),
    PlantedBug(
        "literal text: only special tokens are control tokens",
        "inputs/literal_text.py",
        find="len($content) > 1 and bool($content.replace(BLANK, ' ').strip())",
        plant="False",
        tests=(
            "families/test_family_hostile_text.py::"
            "test_added_tokens_that_are_not_special_stay_words",
        ),
    ),
    PlantedBug(
        "literal text: control tokens that two parts spell together pass",
        "inputs/literal_text.py",
        within="render_conversation",
        find="$written != _control_tokens_in($processor, $template)",
        plant="False",
        tests=(
            "families/test_family_hostile_text.py::test_parts_together_spell_no_control_token"
            "[qwen2.5-vl-image]",
        ),
    ),
    PlantedBug(
        "videos: a mirrored display matrix is taken for a rotation",
        "inputs/media/video.py",
        within="_upright",
        find="x_factor < 0",
        plant="y_factor < 0",
        tests=("inputs/test_media.py::test_every_display_matrix_is_applied",),
    ),
    PlantedBug(
        "tool calls: the first closing mark ends a call",
        "serve/formats/tool_calls.py",
        find="read_object(text, inside)",
        plant="read_object(text[:text.find(dialect.closing) % (len(text) + 1)], inside)",
        tests=("serve/test_formats.py::test_words_and_calls_are_distinguished",),
    ),
    PlantedBug(
        "replayed messages: empty unknown fields are refused",
        "serve/request_schema.py",
        within="ClientObject._drop_empty_unknown_fields",
        find="$name == 'cache_control' or $field is None or $field in ('', [], {})",
        plant="False",
        tests=("serve/test_replay.py::test_other_messages_and_parts_may_be_silent_too",),
    ),
    PlantedBug(
        "a temporary folder that others may write to is used",
        "core/home.py",
        find=(
            "stat.S_ISDIR($state.st_mode) and $state.st_uid == os.getuid() and (not "
            "$others_may_write)"
        ),
        plant="stat.S_ISDIR($state.st_mode)",
        tests=(
            "cli/test_bare_environments.py::test_a_folder_that_is_not_theirs_alone_is_not_used",
        ),
    ),
    PlantedBug(
        "calibrate: a method that beats plain decoding replaces auto",
        "bench/calibration.py",
        find="_is_faster($other, $auto, 1 + TIE_MARGIN) and _is_faster($other, $plain, 1)",
        plant="_is_faster($other, $plain, 1)",
        tests=("bench/test_calibrate.py::test_what_the_verdict_is",),
    ),
    PlantedBug(
        "calibrate: the choice is confirmed on the videos it was chosen on",
        "bench/calibration.py",
        find="[*held_out_videos] * MAX_CONFIRMING_RUNS",
        plant="[*search_videos] * MAX_CONFIRMING_RUNS",
        tests=("bench/test_calibrate.py::test_what_is_reported_chose_nothing",),
    ),
    PlantedBug(
        "recipes: a need that no part offers is let through",
        "core/capabilities.py",
        within="find_unmet_needs",
        find="$capability in $part.needs and $capability not in $offered",
        plant="False",
        tests=(
            "methods/test_legal_recipes.py::test_a_recipe_is_legal_exactly_where_needs_are_offered",
        ),
    ),
    PlantedBug(
        "returned scores are those of refused siblings",
        "engine/returned_scores.py",
        find="(ROOT, *round.verdict.path)",
        plant="(ROOT, *range(len(round.verdict.path)))",
        tests=(
            "engine/test_transformers_habits.py::"
            "test_a_drafted_tree_returns_the_scores_of_its_path",
        ),
    ),
    PlantedBug(
        "a conversation goes on over the caches of an answer that raised",
        "engine/generate.py",
        find="keep and can_continue",
        plant="keep and batch.has_read_prompts",
        tests=(
            "engine/test_conversation_failures.py::"
            "test_an_answer_that_raises_does_not_hold_up_the_next",
        ),
    ),
    PlantedBug(
        "a live window in tokens ignores frames that came during an answer",
        "answering/live_video.py",
        find="self._drop_oldest()",
        within="Live._encode_window",
        plant="False",
        tests=(
            "answering/test_live_video.py::"
            "test_a_window_in_tokens_holds_what_came_during_an_answer",
        ),
    ),
    PlantedBug(
        "media of a turn that was never read count as read",
        "engine/request_batch.py",
        within="RequestBatch.try_continue",
        find="self._set_request($request)",
        plant="(self._set_request($request), setattr(self, '_media', $request.media))",
        tests=("engine/test_new_media.py::test_a_turn_that_was_never_read_leaves_no_trace",),
    ),
    PlantedBug(
        "a parser of a format that gave up allows everything",
        "serve/formats/grammar.py",
        within="Grammar._move_parser",
        find="self._matcher.is_error()",
        plant="False",
        tests=("serve/test_formats.py::test_a_parser_that_gave_up_at_a_draft_is_replaced",),
    ),
    PlantedBug(
        "a stop with special tokens is shown in a stream",
        "serve/detokenizer.py",
        find="withheld_length(self._decode_with_special(self._window), self._stops) > $withheld",
        plant="False",
        tests=("serve/test_writer.py::test_nothing_of_a_stop_string_with_special_tokens_is_shown",),
    ),
    PlantedBug(
        "a round that drafts nothing has the scores of the draft before",
        "drafting/drafters.py",
        find="self._scores.pop($request, None)",
        plant="None",
        tests=("engine/test_answering.py::test_a_round_without_a_draft_has_no_scores_of_one",),
    ),
    PlantedBug(
        "the beginning of a stop string is printed",
        "core/answer_text.py",
        find="$text[: len($text) - $withheld]",
        plant="$text",
        tests=("answering/test_coloured_text.py::test_a_stop_string_is_never_printed",),
    ),
    PlantedBug(
        "the chunks of a long turn all have the positions of its end",
        "model/session.py",
        find="$request.text_length = $length - len($pending) + $stop",
        plant="$request.text_length = $length",
        tests=("model/test_session.py::test_a_long_turn_is_read_in_chunks",),
    ),
    PlantedBug(
        "log-probabilities that add no text are lost at the end of a response",
        "serve/formats/response_items.py",
        find="self._open is not None and self._open.kind is MESSAGE and self._waiting_logprobs",
        plant="False",
        tests=("serve/test_responses.py::test_probabilities_are_the_chats",),
    ),
    PlantedBug(
        "a busy machine keeps all threads",
        "core/free_cores.py",
        find="threads_beside(self._cores_of_others, most, self._cores)",
        plant="most",
        tests=(
            "core/test_free_cores.py::test_others_are_noticed_within_an_answer_and_forgotten_after",
        ),
    ),
    PlantedBug(
        "a sampled answer is planned by the threads that are free",
        "engine/scopes.py",
        find="samples and recipe.needs_costs",
        plant="False",
        tests=(
            "core/test_free_cores.py::test_a_sampled_answer_is_planned_by_the_costs_of_all_threads",
        ),
    ),
    PlantedBug(
        "rows of a document that was cut away count as left out by a head",
        "model/heads/head_session.py",
        find="min(self.read_length, length)",
        plant="self.read_length",
        tests=("model/test_heads.py::test_a_turn_cuts_a_head_back_into_a_document",),
    ),
    PlantedBug(
        "fields that the class of an output does not declare are not stored",
        "model/vision_cache.py",
        find="vars($output) | {**$output}",
        plant="{**output}",
        tests=(
            "model/test_vision_cache.py::test_a_field_that_no_class_declares_is_stored_and_joined",
        ),
    ),
    PlantedBug(
        "media of earlier turns run through the vision tower again",
        "model/vision_cache.py",
        find="$length, $output = _longest_stored($store, $owner, $names, $at)",
        plant="length, output = 0, None",
        tests=("engine/test_new_media.py::test_pixels_of_earlier_turns_are_not_run_again",),
    ),
    PlantedBug(
        "a turn with new media keeps keys of rows that differ",
        "model/session.py",
        find="_cut_to_prompt($old, $prompt, min($shared_rows, $max_reused))",
        plant="_cut_to_prompt(old, prompt, max_reused)",
        tests=("engine/test_new_media.py::test_any_walk_through_videos_answers_as_generate",),
    ),
    PlantedBug(
        "after new media the draft lacks the answers before them",
        "drafting/drafters.py",
        find="torch.cat([self.index[self.index < min($start, $stop)], $text])",
        plant="self.index[self.index < min(start, stop)]",
        tests=(
            "engine/test_new_media.py::test_a_draft_that_is_the_target_is_accepted_after_new_videos",
        ),
    ),
    PlantedBug(
        "a live video never drops a frame",
        "answering/live_video.py",
        find="$total <= self.window.size",
        plant="True",
        tests=("answering/test_live_video.py::test_every_kind_of_window_bounds_what_is_kept",),
    ),
    PlantedBug(
        "a later turn has the draft's seconds of the turns before it too",
        "engine/request_batch.py",
        within="RequestBatch.try_continue",
        find="self._draft_seconds_before = self.drafter.report().seconds",
        plant="pass",
        tests=("engine/test_conversation.py::test_the_drafts_seconds_are_those_of_each_turn",),
    ),
    PlantedBug(
        "Ctrl-C in a command says nothing of how to go on",
        "cli/application.py",
        within="run_application",
        find="$end.code == INTERRUPTED_EXIT_CODE",
        plant="False",
        tests=("cli/test_progress.py::test_ctrl_c_says_how_to_go_on",),
    ),
    PlantedBug(
        "another module of the same name is read for a user's file of methods",
        "methods/registry.py",
        within="_load_file",
        find="$loaded is None or Path($loaded).resolve() != $path.resolve()",
        plant="False",
        tests=(
            "methods/test_sixth_method.py::test_a_file_with_the_name_of_another_module_is_refused",
        ),
    ),
)
