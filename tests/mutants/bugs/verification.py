"""Bugs in verification, sampling, stopping and trees of tokens."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "a drafted token is accepted with probability p instead of p / q",
        "core/verify.py",
        find="min(prob($law, $x) / max(prob($q, $x), 1e-38), 1.0)",
        plant="prob($law, $x)",
        tests=("core/test_verify.py::test_sampled_siblings_leave_p_exactly",),
    ),
    PlantedBug(
        "NaN in the draft's q accepts the token",
        "core/verify.py",
        find="min(prob($law, $x) / max(prob($q, $x), 1e-38), 1.0)",
        plant="min(1.0, prob($law, $x) / max(1e-38, prob($q, $x)))",
        tests=("core/test_verify.py::test_a_draft_law_of_nan_rejects_and_leaves_p",),
    ),
    PlantedBug(
        "the residual is |p - q| instead of max(p - q, 0)",
        "core/verify.py",
        find="$left.clamp_(min=0.0)",
        plant="$left.abs_()",
        tests=("core/test_verify.py::test_sampled_siblings_leave_p_exactly",),
    ),
    PlantedBug(
        "the residual treats a sampled token as a chosen one",
        "core/verify.py",
        find="residual($law, $x if $q is None else $q)",
        plant="residual($law, $x)",
        tests=("core/test_verify.py::test_sampled_siblings_leave_p_exactly",),
    ),
    PlantedBug(
        "the residual is not carried on to the next sibling",
        "core/verify.py",
        find="residual(law, x if q is None else q)",
        plant="residual(p(node), x if q is None else q)",
        tests=("core/test_verify.py::test_sampled_siblings_leave_p_exactly",),
    ),
    PlantedBug(
        "the first drafted token is accepted without verification",
        "core/verify.py",
        find="""
            if is_accepted:
                ...
        """,
        plant="""
            if node == ROOT or is_accepted:
                ...
        """,
        tests=("engine/test_greedy.py::test_the_first_drafted_token_is_verified_too",),
    ),
    PlantedBug(
        "the bonus token is drawn from the row of the node's neighbour",
        "core/verify.py",
        within="verify",
        find="p(node)",
        plant="p(max(node - 1, ROOT) if accepted and (not children(tree, node)) else node)",
        tests=("core/test_verify.py::test_greedy_follows_the_target_and_nothing_else",),
    ),
    PlantedBug(
        "no bonus token is drawn when every drafted token was accepted",
        "core/verify.py",
        find='_verdict($tree, $accepted, $own, "recovered" if $refused else "bonus")',
        plant=(
            "_verdict($tree, $accepted, None if $accepted and not $refused else $own, "
            '"recovered" if $refused else "bonus")'
        ),
        tests=("core/test_verify.py::test_greedy_follows_the_target_and_nothing_else",),
    ),
    PlantedBug(
        "a tie goes to the last of the likeliest tokens",
        "core/sampling.py",
        find="int(token)",
        plant="int((scores == best).nonzero()[-1])",
        tests=("engine/test_greedy.py::test_exact_ties_go_to_the_first_id",),
    ),
    PlantedBug(
        "noise is keyed by the place in the round instead of the answer",
        "core/sampling.py",
        within="Scores.noise",
        find="self.position + $below",
        plant="$below",
        tests=("core/test_sampling.py::test_verification_noise_is_keyed_by_absolute_position",),
    ),
    PlantedBug(
        "a second turn draws with the noise of the first turn",
        "core/sampling.py",
        find="max(len(self.context), self.answer_length)",
        plant="self.answer_length",
        tests=("engine/test_conversation.py::test_one_seed_gives_every_turn_noise_of_its_own",),
    ),
    PlantedBug(
        "sampled siblings are all drawn with the same noise",
        "core/sampling.py",
        find="uniform(self.rules.seed, self.request, 'draft', $place, $before, $began)",
        plant="uniform(self.rules.seed, self.request, 'draft', $place, 0, $began)",
        tests=("laws/test_registered.py::test_no_noise_is_used_for_two_draws[shape=sampled-2]",),
    ),
    PlantedBug(
        "shapes see the draft's logits before the sampling rules",
        "core/sampling.py",
        find="self.rules.apply_rules($row, $ids, self._answer($node))",
        plant="$row",
        tests=("drafting/shapes/test_rules_in_shapes.py::test_no_shape_drafts_a_banned_word",),
    ),
    PlantedBug(
        "drafts call a logits processor that remembers its calls",
        "core/sampling.py",
        find="tuple(($rule for $rule in self.processors if not may_remember($rule)))",
        plant="self.processors",
        tests=("engine/test_stateful_processors.py",),
    ),
    PlantedBug(
        "drafting, accepting and drawing share one noise",
        "core/noise.py",
        within="uniform",
        find="ROLES[$role]",
        plant="0",
        tests=(
            "core/test_sampling.py::test_noise_depends_on_each_of_its_keys_and_on_nothing_else",
        ),
    ),
    PlantedBug(
        "requests of a batch share their noise",
        "core/noise.py",
        within="uniform",
        find="[$seed % 2 ** 64, $request]",
        plant="[$seed % 2 ** 64, 0]",
        tests=("engine/test_seeds.py::test_requests_of_a_batch_draw_their_own_noise",),
    ),
    PlantedBug(
        "penalties ignore the drafted tokens of the block",
        "core/sampling.py",
        find="[*self.context, *self._path_tokens($node)]",
        plant="list(self.context)",
        tests=("core/test_sampling.py::test_penalties_see_prompt_text_and_path_at_every_node",),
    ),
    PlantedBug(
        "NaN logits give a token instead of an error",
        "core/sampling.py",
        find="isnan($best.item())",
        plant="bool($best.isposinf())",
        tests=("engine/test_failing_drafts.py::test_a_target_of_nan_ends_with_an_error",),
    ),
    PlantedBug(
        "tokens after the end of the answer are kept",
        "core/stopping.py",
        find="""
            if token in self.conditions.eos or self._contains_stop_string(request):
                return (count, 'stop')
        """,
        plant="""
            if token in self.conditions.eos or self._contains_stop_string(request):
                return (len(tokens), 'stop')
        """,
        tests=("engine/test_where_answers_end.py::test_tokens_after_the_end_count_nowhere",),
    ),
    PlantedBug(
        "the length limit is checked before the end token",
        "core/stopping.py",
        find="""
            if token in self.conditions.eos or self._contains_stop_string(request):
                return (count, 'stop')
        """,
        plant="""
            if token in self.conditions.eos or self._contains_stop_string(request):
                is_full = len(answer) >= self.conditions.max_new_tokens
                return (count, 'length' if is_full else 'stop')
        """,
        tests=(
            "engine/test_where_answers_end.py::test_the_length_limit_and_the_end_give_different_finish_reasons",
        ),
    ),
    PlantedBug(
        "the end is looked for in the last token of a round only",
        "core/stopping.py",
        find="token in self.conditions.eos",
        plant="count == len(tokens) and token in self.conditions.eos",
        tests=(
            "engine/test_where_answers_end.py::test_an_end_inside_an_accepted_run_ends_the_answer",
        ),
    ),
    PlantedBug(
        "a node of a tree attends to its neighbour's path instead of its parent's",
        "core/tree.py",
        within="ancestors",
        find="$mask[$node] |= $mask[$parent]",
        plant="$mask[$node] |= $mask[$node - 1]",
        tests=("core/test_tree.py::test_paths_depths_and_ancestors_are_the_climb_to_the_root",),
    ),
    PlantedBug(
        "nodes of the tree do not attend to the pending tokens",
        "core/tree.py",
        find="(*$line, *($parent + $pending for $parent in $tree.parents))",
        plant=(
            "(*$line, *($parent + $pending if $parent >= 0 else ROOT for $parent in $tree.parents))"
        ),
        tests=("model/test_session.py::test_any_history_of_trees_and_commits_equals_the_oracle",),
    ),
    PlantedBug(
        "a scored node is taken for another one of the same token",
        "core/tree.py",
        find=(
            "common_length(zip($one.tokens, $one.parents, strict=True), zip($other.tokens, "
            "$other.parents, strict=True))"
        ),
        plant=(
            "common_length(zip($one.tokens, $one.tokens, strict=True), zip($other.tokens, "
            "$other.tokens, strict=True))"
        ),
        tests=("core/test_tree.py::test_shared_counts_leading_nodes_with_equal_token_and_parent",),
    ),
    PlantedBug(
        "a draft after a rejection samples with the noise of the rejected one",
        "core/sampling.py",
        find="self.answer_length if self.draft_start is None else self.draft_start",
        plant="0",
        tests=("laws/test_registered.py::test_no_noise_is_used_for_two_draws",),
    ),
    PlantedBug(
        "a token is taken from NaN logits when all nodes are read at once",
        "core/sampling.py",
        within="Scores.every_law",
        find="NO_TOKEN in $likeliest",
        plant="False",
        tests=("core/test_sampling.py::test_every_law_is_the_law_at_each_node",),
    ),
    PlantedBug(
        "NaN logits give token 0 when sampling",
        "core/sampling.py",
        find="""
            if bool($law[0].isnan()):
                raise BrokenLaw($message)
        """,
        plant="""
            if bool($law[0].isnan()):
                return 0
        """,
        tests=("core/test_sampling.py::test_a_law_of_nan_is_refused_when_sampling_too",),
    ),
    PlantedBug(
        "grammars: the drafted tokens are not part of the answer so far",
        "core/sampling.py",
        find="[*self.context[len(self.context) - self.answer_length:], *self._path_tokens($node)]",
        plant="list(self.context[len(self.context) - self.answer_length:])",
        tests=("serve/test_formats.py::test_drafts_see_what_answers_may_hold",),
    ),
    PlantedBug(
        "stop strings: special tokens are removed before comparing",
        "core/stopping.py",
        within="Stops.__init__",
        find="[$decoder for $decoder in ($decode, $spell) if $decoder is not None]",
        plant="[$decoder for $decoder in ($decode,) if $decoder is not None]",
        tests=("engine/test_special_stops.py",),
    ),
    PlantedBug(
        "control: a variable is renamed",
        "core/verify.py",
        find="""
            $left = $p.clone()
            if isinstance($q, int):
                $left[$q] = 0.0
            else:
                $left[:$q.shape[0]] -= $q.to($left)
                $left.clamp_(min=0.0)
            $total: Float[Tensor, ''] = $left.sum()
            return $left / $total if bool($total > 0) and bool(torch.isfinite($total)) else $p
        """,
        plant="""
            rest = $p.clone()
            if isinstance($q, int):
                rest[$q] = 0.0
            else:
                rest[:$q.shape[0]] -= $q.to(rest)
                rest.clamp_(min=0.0)
            $total: Float[Tensor, ''] = rest.sum()
            return rest / $total if bool($total > 0) and bool(torch.isfinite($total)) else $p
        """,
        tests=(
            "core/test_verify.py",
            "core/test_sampling.py",
        ),
        survives=True,
    ),
)
