"""Bugs in drafters, shapes, views, schedules and the costs that shapes read."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "fit counts an accepted further sibling as an accepted first token",
        "drafting/shapes/fit.py",
        within="Fit.fold",
        find="round.tree.parents.index($parent) == $node",
        plant="$node >= 0",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_the_rate_is_of_first_tokens_also_after_trees",
        ),
    ),
    PlantedBug(
        "the tokens that a failed draft had sampled are thrown away",
        "drafting/fallback.py",
        within="Fallback._sound_trees",
        find="self._undelivered.pop($request, $tree)",
        plant="$tree",
        tests=(
            "laws/test_failing_drafts.py::test_a_chain_that_fails_keeps_the_law_whatever_the_draft",
        ),
    ),
    PlantedBug(
        "what was drawn for requests that are not asked for is thrown away",
        "drafting/fallback.py",
        within="Fallback._try",
        find="{**$failure.trees}",
        plant="dict([*$failure.trees.items()][:1])",
        tests=(
            "laws/test_failing_workers.py::"
            "test_a_failure_while_one_request_is_asked_for_keeps_what_others_drew",
        ),
    ),
    PlantedBug(
        "a draft that was given up keeps its caches",
        "drafting/drafters.py",
        within="SessionDrafter.close",
        find="self.session.requests.clear()",
        plant="self.session.requests.copy()",
        tests=("engine/test_failing_drafts.py::test_a_draft_that_was_given_up_frees_its_caches",),
    ),
    PlantedBug(
        "a token sampled after the last forward is lost when the draft fails",
        "drafting/drafters.py",
        within="drive",
        find="$draft.tree_with_draws",
        plant="$draft.tree",
        tests=(
            "laws/test_failing_drafts.py::"
            "test_a_shape_that_raises_by_what_it_drew_does_not_bend_the_law",
        ),
    ),
    PlantedBug(
        "sampled tokens beyond the target's last row are dropped",
        "drafting/schedule.py",
        find="$group.unjudged = unjudged_trees($trees, $judgement)",
        plant="$group.unjudged = {}",
        tests=(
            "laws/test_failing_drafts.py::test_a_target_without_memory_judges_all_that_was_drawn",
        ),
    ),
    PlantedBug(
        "a token that was chosen carries a q as if it had been sampled",
        "drafting/shapes/policies.py",
        find="add(tree, open_nodes[parent], best[parent][rank])",
        plant="add(tree, open_nodes[parent], best[parent][rank], scores.rows[-1].softmax(-1))",
        tests=("laws/test_tables.py::test_the_joint_law_of_three_tokens_is_the_targets",),
    ),
    PlantedBug(
        "the draft's tree is not checked for faults",
        "drafting/fallback.py",
        find="find_fault($tree, self._vocab)",
        plant="find_fault(Tree(), self._vocab)",
        tests=("engine/test_failing_drafts.py::test_a_draft_that_fails_costs_speed_only",),
    ),
    PlantedBug(
        "costs: the time of a capture counts as the time of a step",
        "drafting/shapes/cost_measurement.py",
        within="_time_forwards",
        find="""
            if $session.cuda_graphs is not None:
                time_step($session, $context, $rows)
                ...
        """,
        plant="""
            if $session.cuda_graphs is not None:
                ...
        """,
        tests=("model/test_cuda_graphs.py::test_what_forwards_cost_is_measured_on_replays",),
    ),
    PlantedBug(
        "auto: an unlikely sampled token is thrown away",
        "drafting/shapes/auto.py",
        find="$chance = $estimates.chance($odds)",
        plant="""
            token, q = scores.draw(last, law)
            if q is not None:
                scores.draws.pop()
                $odds = float(q[token])
            $chance = $estimates.chance($odds)
        """,
        tests=(
            "laws/test_registered.py::"
            "test_the_next_three_tokens_have_exactly_the_targets_law_at_the_start"
            "[auto fair, shape=auto fair]",
        ),
    ),
    PlantedBug(
        "auto: tokens sampled beyond a rejection change the costs",
        "drafting/shapes/auto.py",
        find="len($round.verdict.accepted) + ($round.verdict.kind == 'recovered')",
        plant="len($round.tree)",
        tests=(
            "drafting/shapes/test_auto.py::test_what_was_drawn_beyond_a_refusal_teaches_nothing",
        ),
    ),
    PlantedBug(
        "auto: measured seconds decide while sampling",
        "drafting/shapes/auto.py",
        find="not $round.p.rules.sample",
        plant="True",
        tests=(
            "drafting/shapes/test_auto.py::test_what_is_sampled_does_not_depend_on_how_fast_it_was",
        ),
    ),
    PlantedBug(
        "auto: a slow verification changes the costs while sampling",
        "drafting/shapes/auto.py",
        within="Auto._verify_slowdown_after",
        find="$round.p.rules.sample or not $round.has_typical_duration",
        plant="not $round.has_typical_duration",
        tests=(
            "drafting/shapes/test_auto.py::test_what_is_sampled_does_not_depend_on_how_fast_it_was",
        ),
    ),
    PlantedBug(
        "auto: a draft that did not pay reads every prompt all the same",
        "drafting/recipe.py",
        within="plan",
        find="$model and $alone and $shape.has_measured_draft and not $shape.is_expected_to_pay()",
        plant="False",
        tests=(
            "drafting/test_drafts_that_do_not_pay.py::"
            "test_a_draft_that_did_not_pay_reads_no_prompt",
        ),
    ),
    PlantedBug(
        "the round that ends an answer teaches nothing",
        "drafting/schedule.py",
        within="_rounds",
        find="draft.learner.fold($group.states.pop(request), round)",
        plant="draft.learner.fold(s, round) if [s := $group.states.pop(request)] "
        "and round.finish is None else s",
        tests=(
            "drafting/test_drafts_that_do_not_pay.py::test_an_answer_of_a_single_round_teaches",
        ),
    ),
    PlantedBug(
        "a rounded target is charged for a prefill of its own",
        "drafting/shapes/cost_measurement.py",
        within="affordable_share",
        find="not reads_target_keys",
        plant="draft is not target",
        tests=("drafting/shapes/test_cost_measurement.py::test_the_share_a_draft_can_afford",),
    ),
    PlantedBug(
        "auto: a draft that did not pay once is never tried again",
        "drafting/shapes/auto.py",
        within="Auto.learnt_costs",
        find="(1 - FORGOTTEN_COST_SHARE) * $self.forward_costs.draft",
        plant="$self.forward_costs.draft",
        tests=(
            "drafting/test_drafts_that_do_not_pay.py::"
            "test_a_draft_that_is_not_tried_is_tried_again",
        ),
    ),
    PlantedBug(
        "rounds: a forward that is not captured yet is taken for a usual one",
        "core/result.py",
        within="Round.has_typical_duration",
        find="$self.verify_seconds > 0 and not $self.first_of_size",
        plant="$self.verify_seconds > 0",
        tests=(
            "drafting/shapes/test_auto.py::test_a_round_of_a_new_size_teaches_no_seconds",
            "drafting/shapes/test_cost_measurement.py::"
            "test_a_round_of_a_new_size_teaches_fit_no_seconds",
        ),
    ),
    PlantedBug(
        "auto: the seconds of a forward that is not captured yet are those of a retry",
        "drafting/shapes/auto.py",
        within="Auto._round_seconds",
        find="not $round.p.rules.sample and not $round.first_of_size",
        plant="not $round.p.rules.sample",
        tests=("drafting/shapes/test_auto.py::test_a_round_of_a_new_size_teaches_no_seconds",),
    ),
    PlantedBug(
        "schedule: a round does not say that its forward was the first of its size",
        "drafting/schedule.py",
        within="advance",
        find="$first = capture_new_sizes()",
        plant="""
            $first = False
            capture_new_sizes()
        """,
        tests=("gpu/test_captures.py::test_a_second_answer_captures_nothing",),
    ),
    PlantedBug(
        "auto: a shared round without a draft is waited for again and again",
        "drafting/shapes/auto.py",
        within="Auto._times_after",
        find="$times._replace(since_plain=0)",
        plant="$times",
        tests=(
            "drafting/shapes/test_auto.py::"
            "test_a_round_that_should_show_what_plain_decoding_takes_may_be_shared",
        ),
    ),
    PlantedBug(
        "auto: alternatives are drafted beside a draft that reaches the end",
        "drafting/shapes/auto.py",
        find="""
            if not $scores.may_go_on($tree, $last):
                return $tree
        """,
        plant="""
            if not $scores.may_go_on($tree, $last):
                break
        """,
        tests=("drafting/shapes/test_auto.py::test_no_draft_goes_on_after_the_end_of_an_answer",),
    ),
    PlantedBug(
        "a draft goes on where the answer is as long as it may be",
        "core/sampling.py",
        find="self.answer_length + depth(tree, node) + 1 < limit",
        plant="self.answer_length + depth(tree, node) + 1 <= limit",
        tests=(
            "drafting/shapes/test_rules_in_shapes.py::"
            "test_no_shape_drafts_more_levels_than_an_answer_can_take",
        ),
    ),
    PlantedBug(
        "sage drafts below a token that ends the answer",
        "methods/sage.py",
        find="$reach.expands(level, path_probability) and $scores.may_go_on(tree, node)",
        plant="$reach.expands(level, path_probability)",
        tests=(
            "drafting/shapes/test_rules_in_shapes.py::"
            "test_no_shape_drafts_below_a_token_that_ends_the_answer",
        ),
    ),
    PlantedBug(
        "a resumed run of batches begins with another method than it would have",
        "bench/runner.py",
        find="rotation = batch_number % len(order)",
        plant="rotation = done // plan.batch % len(order)",
        tests=("bench/test_bench_runner.py::test_batches_rotate_as_without_an_interruption",),
    ),
    PlantedBug(
        "auto: drafting that was given up is never tried again",
        "drafting/shapes/auto.py",
        find="""
            if not $estimates.pause.is_over:
                return None
        """,
        plant="return None",
        tests=(
            "drafting/shapes/test_auto.py::test_it_is_tried_again_ever_more_seldom_and_comes_back",
        ),
    ),
    PlantedBug(
        "auto: the wait before the next try does not grow",
        "drafting/shapes/auto.py",
        find="min(MAX_RETRY_AFTER_ROUNDS, $longer)",
        plant="RETRY_AFTER_ROUNDS",
        tests=(
            "drafting/shapes/test_auto.py::test_it_is_tried_again_ever_more_seldom_and_comes_back",
        ),
    ),
    PlantedBug(
        "auto: alternatives cost nothing",
        "drafting/shapes/auto.py",
        within="_count_paying_runners_up",
        find="$gain - $plan.rate * ($plan.costs.verify(1 + $nodes + $count) - $before)",
        plant="$gain",
        tests=(
            "drafting/shapes/test_auto.py::"
            "test_a_runner_up_is_not_drafted_over_a_step_of_the_verifying_time",
        ),
    ),
    PlantedBug(
        "auto: an answer cut by a stop counts as a rejection",
        "drafting/shapes/auto.py",
        find="$accepted is None and $round.verdict.own is None",
        plant="False",
        tests=("drafting/shapes/test_auto.py::test_an_answer_cut_short_refuses_nothing",),
    ),
    PlantedBug(
        "auto: the draft's own confidence does not count",
        "drafting/shapes/auto.py",
        find="$judged += $estimates.acceptance.surprise.trust * $more",
        plant="pass",
        tests=(
            "drafting/shapes/test_auto.py::"
            "test_a_draft_that_says_itself_it_knows_nothing_is_dropped_sooner",
        ),
    ),
    PlantedBug(
        "auto: the longest chain is chosen, whatever it costs",
        "drafting/shapes/auto.py",
        within="best_round",
        find="$tokens * $best[1] > $best[0] * $seconds",
        plant="$tokens > $best[0]",
        tests=("drafting/shapes/test_auto.py::test_a_useless_draft_costs_next_to_nothing",),
    ),
    PlantedBug(
        "costs: beyond the last measured point nothing costs more",
        "core/costs.py",
        within="Costs.verify",
        find="$high + ($high - $low) * ($rows - $b) / ($b - $a)",
        plant="$high",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_costs_are_linear_between_and_beyond_the_measured_points",
        ),
    ),
    PlantedBug(
        "fit: a round cut by a stop counts as a rejection",
        "drafting/shapes/fit.py",
        find="$round.verdict.kind == 'recovered'",
        plant="$round.verdict.kind != 'bonus'",
        tests=(
            "drafting/shapes/test_cost_measurement.py::test_a_round_cut_by_a_stop_is_no_refusal",
        ),
    ),
    PlantedBug(
        "fit: a chain of any length costs one draft forward",
        "drafting/shapes/fit.py",
        within="Fit.choose",
        find="_Option($n, expected_chain($rate, $n), $n, $n + 1)",
        plant="_Option($n, expected_chain($rate, $n), 1, $n + 1)",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_fit_chooses_what_a_search_over_everything_chooses",
        ),
    ),
    PlantedBug(
        "costs: a pair that is used often is still measured at a few points only",
        "drafting/shapes/cost_measurement.py",
        find="$stored['used'] >= ANSWERS_BEFORE_ALL_ROW_COUNTS",
        plant="$stored['used'] > ANSWERS_BEFORE_ALL_ROW_COUNTS",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_what_is_used_often_is_timed_at_every_point",
        ),
    ),
    PlantedBug(
        "costs: the slowest of several timings counts",
        "drafting/shapes/cost_measurement.py",
        find="[min($times) for $times in zip(*$repeats, strict=True)]",
        plant="[max($times) for $times in zip(*$repeats, strict=True)]",
        tests=(
            "drafting/shapes/test_cost_measurement.py::"
            "test_bare_forwards_are_taken_in_turns_and_the_quickest_counts",
        ),
    ),
    PlantedBug(
        "costs: each request of a batch pays for the whole forward",
        "core/costs.py",
        within="Costs.per_request",
        find="self.verify_together($requests, $requests * $rows) / $requests",
        plant="self.verify_together($requests, $requests * $rows)",
        tests=(
            "drafting/shapes/test_cost_measurement.py::test_shared_costs_are_a_part_of_the_whole",
        ),
    ),
    PlantedBug(
        "a chain stops by looking at the token it has sampled",
        "drafting/shapes/policies.py",
        find="""
            if len($tree) and (not self.goes_on($scores, $last, $law)):
                return None
            $token, $q = $scores.draw($last, $law)
        """,
        plant="""
            $token, $q = $scores.draw($last, $law)
            if len($tree) and $q is not None and (float($q[$token]) < 0.5):
                return None
        """,
        tests=(
            "laws/test_registered.py::"
            "test_the_next_three_tokens_have_exactly_the_targets_law_at_the_start",
        ),
    ),
    PlantedBug(
        "schedule: NaN in one request ends all of them",
        "drafting/schedule.py",
        find="""
            $verdicts[$request], $endings[$request] = (EMPTY_VERDICT, 'error')
            continue
        """,
        plant="raise",
        tests=("engine/test_scheduler.py::test_a_target_of_nan_ends_one_request_alone",),
    ),
    PlantedBug(
        "schedule: tokens after the end stay in the verdict",
        "drafting/schedule.py",
        find="Verdict($verdict.path[:$count], $verdict.accepted[:$count], own=None, kind=None)",
        plant="Verdict($verdict.path, $verdict.accepted, own=None, kind=None)",
        tests=(
            "engine/test_where_answers_end.py::"
            "test_a_draft_that_goes_beyond_the_limit_is_cut_there",
            "engine/test_where_answers_end.py::test_tokens_after_the_end_count_nowhere",
        ),
    ),
    PlantedBug(
        "schedule: the token drafted beside those in flight is not judged with it",
        "drafting/schedule.py",
        find="$trees = $draft.extend($in_flight)",
        plant="""
            $draft.extend($in_flight)
            $trees = $in_flight
        """,
        tests=("methods/test_hippo_schedule.py::test_every_round_judges_by_the_papers_rule",),
    ),
    PlantedBug(
        "saliency: a budget is rounded down",
        "drafting/views/saliency.py",
        within="budget",
        find="$tokens * $keep + 0.5",
        plant="$tokens * $keep",
        tests=("drafting/views/test_saliency.py::test_budget_rounds_and_leaves_at_least_one",),
    ),
    PlantedBug(
        "saliency: the mass reached leaves out the token that reaches it",
        "drafting/views/saliency.py",
        find="int(($before < $threshold).sum())",
        plant="int(($before < $threshold).sum()) - 1",
        tests=(
            "drafting/views/test_saliency.py::"
            "test_top_mass_is_the_smallest_top_set_that_reaches_the_share",
        ),
    ),
    PlantedBug(
        "saliency: even samples begin at the edge",
        "drafting/views/saliency.py",
        find="(torch.arange($count) * 2 + 1) * len($items) // (2 * $count)",
        plant="torch.arange($count) * len($items) // $count",
        tests=("drafting/views/test_saliency.py::test_spread_is_even",),
    ),
    PlantedBug(
        "saliency: only the frame before counts as a neighbour in time",
        "drafting/views/saliency.py",
        within="temporal",
        find="""
            for $row in ($before, $after):
                ...
        """,
        plant="""
            for $row in ($after,):
                ...
        """,
        tests=("methods/test_hippo_scores.py::test_temporal_and_spatial_are_eq_3_to_6",),
    ),
    PlantedBug(
        "saliency: scaled over the video instead of each frame",
        "drafting/views/saliency.py",
        within="per_frame",
        find="$grid[:, :2]",
        plant="$grid[:, :1]",
        tests=("methods/test_hippo_scores.py::test_scores_are_z_scored_within_their_frame",),
    ),
    PlantedBug(
        "saliency: heads are joined by their maximum instead of their mean",
        "drafting/views/saliency.py",
        find="$mass.mean((0, 1))",
        plant="$mass.amax((0, 1))",
        tests=("drafting/views/test_saliency.py::test_attention_averages_layers_and_heads",),
    ),
    PlantedBug(
        "renewed views: tokens are chosen by the attention at prefill",
        "drafting/drafters.py",
        within="SelfDrafter._refresh_view",
        find="$prefill.with_latest_attention()",
        plant="$prefill",
        tests=("methods/test_renewed_views.py::test_each_round_drafts_on_the_keys_looked_at_last",),
    ),
    PlantedBug(
        "a document is sampled with holes like a video",
        "drafting/views/basic.py",
        find="is_document = $prompt.document_rows.cpu()",
        plant="is_document = torch.zeros(prompt.visual_tokens, dtype=torch.bool)",
        tests=("drafting/views/test_basic.py::test_what_is_affordable_of_a_text_has_no_holes",),
    ),
    PlantedBug(
        "recipes: a draft that starts early is taken to need no schedule beside the target",
        "drafting/views/basic.py",
        within="Pruned.needs",
        find="self.early != 'wait'",
        plant="False",
        tests=(
            "methods/test_legal_recipes.py::test_a_recipe_is_legal_exactly_where_needs_are_offered",
        ),
    ),
    PlantedBug(
        "auto: a verdict on a copy ends or begins a pause of the draft",
        "drafting/shapes/auto.py",
        find="""
            if is_copy:
                return $estimates
        """,
        plant="pass",
        tests=("drafting/test_repetitions.py::test_a_verdict_on_a_copy_says_nothing_of_the_draft",),
    ),
    PlantedBug(
        "auto: copies that were refused are forgotten",
        "drafting/shapes/auto.py",
        within="_learn_from_copy",
        find="$estimates._replace(copy_calibration=$calibration)",
        plant="$estimates",
        tests=(
            "drafting/test_repetitions.py::"
            "test_copies_that_are_refused_end_and_those_that_are_right_grow",
        ),
    ),
    PlantedBug(
        "copies: places of a text that is gone are kept",
        "drafting/repetitions.py",
        find="self._next_places.clear()",
        plant="None",
        tests=(
            "drafting/test_repetitions.py::"
            "test_the_index_finds_what_a_search_of_the_whole_text_finds",
        ),
    ),
    PlantedBug(
        "copies: placeholders are copied",
        "drafting/repetitions.py",
        within="RepetitionIndex._is_allowed",
        find="$token not in self._excluded",
        plant="True",
        tests=(
            "drafting/test_repetitions.py::"
            "test_the_index_finds_what_a_search_of_the_whole_text_finds",
            "engine/test_copies.py::test_a_copy_proposes_no_placeholder",
        ),
    ),
    PlantedBug(
        "recipes: a chain that stops by itself is taken for one of a fixed length",
        "drafting/shapes/policies.py",
        find="type(self).goes_on is Chain.goes_on",
        plant="True",
        tests=("methods/test_sixth_method.py::test_its_parts_are_chosen_by_their_names",),
    ),
)
