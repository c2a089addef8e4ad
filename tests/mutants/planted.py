"""Bugs to plant: one small change each, and the tests that must notice it.

``old`` stands exactly once in ``file`` (below ``src/saccade``); ``tests`` are node ids below
``tests/``, as few and as fast as notice it. A mutant with ``survives`` changes nothing and must
pass: it shows that the runner does not kill whatever it is given.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    survives: bool = False


VERIFY = "core/test_verify.py"
SAMPLING = "core/test_sampling.py"
PREFIX_CACHE = "engine/test_prefix_cache.py"
SESSION = "model/test_session.py"
BUGS = "engine/test_regressions.py"
FAULTS = "engine/test_faults.py"
PARALLEL = "engine/test_parallel.py"
LAW = "laws/test_registered.py"
FAILING = "laws/test_failing_drafts.py"
CONTROL = "drafting/shapes/test_auto.py"
COMPILED = "model/test_compiled.py"
FEW_ROWS = "model/test_few_rows.py"
COST = "drafting/shapes/test_cost_measurement.py"
SALIENCY = "drafting/views/test_saliency.py"
CALIBRATE = "bench/test_calibrate.py"
SAGE = "methods/test_sage.py"
SIXTH = "methods/test_sixth_method.py"
EARLY_AUTO = (
    f"{LAW}::test_the_next_three_tokens_have_exactly_the_targets_law_at_the_start"
    "[auto dear, shape=auto dear]"
)
LATE_AUTO = EARLY_AUTO.replace("at_the_start", "late_in_an_answer")
PACE = "engine/test_round_size.py"
PAGES_STEP = "methods/test_pages.py::test_a_step_reads_the_pages_it_asks_for"
FRESH_LOOKS = "methods/test_fresh.py::test_it_tells_what_the_last_judged_rows_attended_to"
SHORT_PROMPTS = (
    "engine/test_scheduler.py::test_short_prompts_are_read_together_as_far_as_a_chunk_goes"
)
HOSTILE = "families/test_family_hostile_text.py"
HISTORY_ENDS = "engine/test_generate.py"
RECURRENT = "model/test_recurrent.py"
HYBRIDS = "families/test_hybrid_models.py"
STATE_HISTORIES = f"{RECURRENT}::test_any_history_of_a_hybrid_equals_the_oracle"
HISTORIES = f"{SESSION}::test_b10_any_history_of_trees_and_commits_equals_the_oracle"

MUTANTS = (
    # -- what a GPU costs --------------------------------------------------------------------------
    Mutant(
        "a step on a GPU costs its bytes alone",
        "bench/hardware/doctor.py",
        "return self.step + self.fixed",
        "return self.step",
        ("bench/test_doctor.py::test_a_layer_costs_a_fixed_time_on_a_gpu",),
    ),
    Mutant(
        "a model stopped early has captured steps over a pool of its own",
        "model/cuda_graphs.py",
        "pool = None if backbone.full_backbone is None else graphs_of(backbone.full_backbone).pool",
        "pool = None",
        ("gpu/test_methods_on_gpu.py::test_a_method_is_right_and_within_its_budget[layerskip]",),
    ),
    Mutant(
        "a parallel method on one GPU says nothing of it",
        "engine/request_batch.py",
        'return draft.device.type == "cuda" and draft.device == self.target.device',
        "return False",
        ("gpu/test_warnings_on_gpu.py::test_pointless_choices_are_named",),
    ),
    # -- layers with a state ---------------------------------------------------------------------
    Mutant(
        "the state of a refused node is kept",
        "model/recurrent.py",
        "path = journal.path[:count]",
        "path = tuple(range(journal.path[count - 1] + 1))",
        (STATE_HISTORIES,),
    ),
    Mutant(
        "a node's convolution reads the inputs one place too early",
        "model/recurrent.py",
        "torch.tensor(path[-past - 1 :])",
        "torch.tensor(path[-past - 2 : -1])",
        (f"{RECURRENT}::test_a_convolution_reads_the_last_inputs_of_a_path",),
    ),
    Mutant(
        "the window after text is one input old",
        "model/recurrent.py",
        "window=text[len(text) - self.past :])",
        "window=text[len(text) - self.past - 1 : -1])",
        (f"{RECURRENT}::test_a_layer_is_its_own_module_along_every_path",),
    ),
    Mutant(
        "the window after an accepted path is one input old",
        "model/recurrent.py",
        "self.inputs.index_select(0, path)])[-past:]",
        "self.inputs.index_select(0, path)])[-past - 1 : -1]",
        (f"{RECURRENT}::test_a_convolution_reads_the_last_inputs_of_a_path",),
    ),
    Mutant(
        "the decay of what is left of a chain still begins before its accepted part",
        "model/recurrent.py",
        "self.total_decay[:, start:] - passed",
        "self.total_decay[:, start:] - 0 * passed",
        (f"{RECURRENT}::test_what_follows_an_accepted_part_of_a_chain_stays_scored",),
    ),
    Mutant(
        "a new node's decay begins at the root, not at its scored ancestor",
        "model/recurrent.py",
        "total = total + before",
        "total = total + 0 * before",
        (f"{RECURRENT}::test_a_row_of_a_tree_reads_its_own_path_alone",),
    ),
    Mutant(
        "a snapshot is of another length than its states",
        "model/recurrent.py",
        "self._snapshots[self.length] = self.states",
        "self._snapshots[self.length - 1] = self.states",
        (f"{RECURRENT}::test_states_of_an_accepted_path_and_of_snapshots_can_be_had_again",),
    ),
    Mutant(
        "the states at the end of the pictures are forgotten",
        "model/recurrent.py",
        "if length not in spared]",
        "if length]",
        (f"{RECURRENT}::test_a_text_is_never_cut_back_to_before_a_picture",),
    ),
    Mutant(
        "a shared prefix is reused to where no state is known",
        "model/prefix_cache.py",
        "copied_rows = best.cache.nearest_length(min(best_rows, max_rows))",
        "copied_rows = min(best_rows, max_rows)",
        (f"{HYBRIDS}::test_a_prompt_that_shares_half_of_another_is_right",),
    ),
    Mutant(
        "a turn cuts a text back to where no state is known",
        "model/session.py",
        "length = request.cache.nearest_length(request.prompt_rows[0] + cached_tokens)",
        "length = request.prompt_rows[0] + cached_tokens",
        (f"{HYBRIDS}::test_every_turn_of_a_hybrid_answers_as_a_fresh_start",),
    ),
    Mutant(
        "a fork needs the states that it had before the rows it computed itself",
        "model/cache.py",
        "self.length = at  #",
        "self.truncate(at)  #",
        (f"{RECURRENT}::test_a_fork_goes_on_after_a_turn_right_behind_a_score",),
    ),
    Mutant(
        "exact is promised for a model with states",
        "model/batch_invariant.py",
        "if model.mixers:",
        "if not model:",
        (f"{HYBRIDS}::test_exact_is_refused_by_name",),
    ),
    # -- verification ----------------------------------------------------------------------------
    Mutant(
        "accept rule: p instead of p / q",
        "core/verify.py",
        "min(prob(law, x) / max(prob(q, x), 1e-38), 1.0)",
        "prob(law, x)",
        (f"{VERIFY}::test_sampled_siblings_leave_p_exactly",),
    ),
    Mutant(
        "accept rule: NaN in q accepts",
        "core/verify.py",
        "min(prob(law, x) / max(prob(q, x), 1e-38), 1.0)",
        "min(1.0, prob(law, x) / max(1e-38, prob(q, x)))",
        (f"{VERIFY}::test_b23_a_law_of_nan_refuses_and_leaves_p",),
    ),
    Mutant(
        "residual: |p - q| instead of max(p - q, 0)",
        "core/verify.py",
        "left.clamp_(min=0.0)",
        "left.abs_()",
        (f"{VERIFY}::test_sampled_siblings_leave_p_exactly",),
    ),
    Mutant(
        "residual: q of a drawn token taken for a chosen one's",
        "core/verify.py",
        "law = residual(law, x if q is None else q)",
        "law = residual(law, x)",
        (f"{VERIFY}::test_sampled_siblings_leave_p_exactly",),
    ),
    Mutant(
        "residual: not carried on to the next sibling",
        "core/verify.py",
        "law = residual(law, x if q is None else q)",
        "law = residual(p(node), x if q is None else q)",
        (f"{VERIFY}::test_sampled_siblings_leave_p_exactly",),
    ),
    Mutant(
        "the draft's first token stands unverified",
        "core/verify.py",
        "if chance >= 1 if certain else",
        "if node == ROOT or chance >= 1 if certain else",
        (f"{BUGS}::test_b08_the_first_drafted_token_is_verified_too",),
    ),
    Mutant(
        "bonus token from the wrong row",
        "core/verify.py",
        "law = p(node)",
        "law = p(max(node - 1, ROOT) if accepted and not children(tree, node) else node)",
        (f"{VERIFY}::test_greedy_follows_the_target_and_nothing_else",),
    ),
    Mutant(
        "no bonus token after full acceptance",
        "core/verify.py",
        'return _verdict(tree, accepted, own, "recovered" if refused else "bonus")',
        "return _verdict(tree, accepted, None if accepted and not refused else own, "
        '"recovered" if refused else "bonus")',
        (f"{VERIFY}::test_greedy_follows_the_target_and_nothing_else",),
    ),
    # -- laws and noise --------------------------------------------------------------------------
    Mutant(
        "tie-break: the last of the likeliest",
        "core/sampling.py",
        "else int(token)",
        "else int((scores == best).nonzero()[-1])",
        (f"{BUGS}::test_b09_exact_ties_go_to_the_first_id",),
    ),
    Mutant(
        "seed: noise counted from the round's start",
        "core/sampling.py",
        "return uniform(self.rules.seed, self.request, role, self.position + below, sibling)",
        "return uniform(self.rules.seed, self.request, role, below, sibling)",
        (f"{SAMPLING}::test_verification_noise_is_keyed_by_absolute_position",),
    ),
    Mutant(
        "seed: a second turn repeats the first turn's noise",
        "core/sampling.py",
        "return max(len(self.context), self.offset)",
        "return self.offset",
        ("engine/test_conversation.py::test_one_seed_gives_every_turn_noise_of_its_own",),
    ),
    Mutant(
        "seed: siblings are the same draw",
        "core/sampling.py",
        '"draft", place, before, began',
        '"draft", place, 0, began',
        (f"{LAW}::test_no_number_is_used_for_two_draws[shape=sampled-2]",),
    ),
    Mutant(
        "rules: shapes see the draft's own logits",
        "core/sampling.py",
        "self._logits_by_node[node] = self.rules.apply_rules(row, ids, self._answer(node))",
        "self._logits_by_node[node] = row",
        ("drafting/shapes/test_rules_in_shapes.py::test_no_shape_drafts_a_banned_word",),
    ),
    Mutant(
        "rules: drafts call a processor that remembers its calls",
        "core/sampling.py",
        "processors = tuple(rule for rule in self.processors if not may_remember(rule))",
        "processors = self.processors",
        ("engine/test_stateful_processors.py",),
    ),
    Mutant(
        "a failed draft's tokens are taken back",
        "drafting/fallback.py",
        "left, self._left = self._left, {}",
        "left, self._left = {}, {}",
        (f"{FAILING}::test_a_chain_that_fails_keeps_the_law_whatever_the_draft",),
    ),
    Mutant(
        "a draw since the last forward is lost with a failed draft",
        "drafting/drafters.py",
        "drawn: Mapping[Any, Tree] = {key: draft.drawn for",
        "drawn: Mapping[Any, Tree] = {key: draft.tree for",
        (f"{FAILING}::test_a_shape_that_raises_by_what_it_drew_does_not_bend_the_law",),
    ),
    Mutant(
        "tokens beyond the target's last law are dropped",
        "drafting/schedule.py",
        "group.unjudged = unjudged_trees(trees, judgement)",
        "group.unjudged = {}",
        (f"{FAILING}::test_a_target_without_memory_judges_all_that_was_drawn",),
    ),
    Mutant(
        "seed: one noise for drafting, accepting and drawing",
        "core/sampling.py",
        "counter = np.array([ROLES[role], position, sibling, began], dtype=np.uint64)",
        "counter = np.array([0, position, sibling, began], dtype=np.uint64)",
        (f"{SAMPLING}::test_noise_depends_on_each_of_its_keys_and_on_nothing_else",),
    ),
    Mutant(
        "seed: requests of a batch share their noise",
        "core/sampling.py",
        "key = np.array([seed % 2**64, request], dtype=np.uint64)",
        "key = np.array([seed % 2**64, 0], dtype=np.uint64)",
        (f"{BUGS}::test_b19_requests_of_a_batch_draw_their_own_noise",),
    ),
    Mutant(
        "q of a chosen token taken for a drawn one's",
        "drafting/shapes/policies.py",
        "tree = add(tree, node_of[above], best[above][rank])",
        "tree = add(tree, node_of[above], best[above][rank], scores.rows[-1].softmax(-1))",
        ("laws/test_tables.py::test_the_joint_law_of_three_tokens_is_the_targets",),
    ),
    Mutant(
        "penalties stale inside a block",
        "core/sampling.py",
        "ids = [*self.context, *self._below(node)]",
        "ids = list(self.context)",
        (f"{SAMPLING}::test_penalties_see_prompt_text_and_path_at_every_node",),
    ),
    Mutant(
        "NaN passes for a token",
        "core/sampling.py",
        "return None if isnan(best.item()) else int(token)",
        "return None if bool(best.isposinf()) else int(token)",
        (f"{FAULTS}::test_a_target_of_nan_ends_with_an_error",),
    ),
    # -- where an answer stops -------------------------------------------------------------------
    Mutant(
        "stop rule: what follows the end stands",
        "core/stopping.py",
        "if token in self.limits.eos or self._ends_in_stop_string(request):\n"
        "                return count,",
        "if token in self.limits.eos or self._ends_in_stop_string(request):\n"
        "                return len(tokens),",
        (f"{BUGS}::test_b03_what_is_cut_counts_nowhere",),
    ),
    Mutant(
        "end order: the limit is looked at before the end",
        "core/stopping.py",
        'return count, "stop"\n            if len(answer) >= self.limits.max_new_tokens:\n'
        '                return count, "length"',
        'return count, "length" if len(answer) >= self.limits.max_new_tokens else "stop"\n'
        "            if len(answer) >= self.limits.max_new_tokens:\n"
        '                return count, "length"',
        (f"{BUGS}::test_b02_limit_and_end_are_told_apart",),
    ),
    Mutant(
        "the end is looked for in the last token of a round only",
        "core/stopping.py",
        "if token in self.limits.eos or self._ends_in_stop_string(request):",
        "if (count == len(tokens) and token in self.limits.eos) or "
        "self._ends_in_stop_string(request):",
        (f"{BUGS}::test_b01_an_end_inside_an_accepted_run_ends_the_answer",),
    ),
    # -- the session and its cache ---------------------------------------------------------------
    Mutant(
        "position off by one",
        "model/session.py",
        "positions.extend(end - 1 + depth for depth",
        "positions.extend(end + depth for depth",
        (f"{BUGS}::test_b14_verified_rows_stand_where_generate_puts_them",),
    ),
    Mutant(
        "positions of pending tokens start too late",
        "model/session.py",
        "positions.extend(range(end - waiting, end))",
        "positions.extend(range(end - waiting + 1, end + 1))",
        (f"{BUGS}::test_b14_verified_rows_stand_where_generate_puts_them",),
    ),
    Mutant(
        "M-RoPE: text goes on from the largest position",
        "model/prompting.py",
        "next_position=int(places[:, -1].max()) + 1",
        "next_position=int(places.max()) + 1",
        (
            "engine/test_greedy.py::test_text_goes_on_from_the_last_token_however_far_the_videos_"
            "time_went",
        ),
    ),  # fmt: skip
    Mutant(
        "rollback: keys of refused tokens stay",
        "model/session.py",
        "request.cache.commit_path(path)",
        "request.cache.commit_path(range(len(path) + (len(path) < len(request.node_logits))))",
        (HISTORIES,),
    ),
    Mutant(
        "keep: the first keys of a tree instead of the path's",
        "model/cache.py",
        "rows = torch.tensor(path[in_place:]) + old_length",
        "rows = torch.arange(in_place, len(path)) + old_length",
        (HISTORIES,),
    ),
    Mutant(
        "keys not cut when a conversation takes tokens back",
        "model/session.py",
        "request.cache.truncate(request.prompt_rows[0] + cached_tokens)",
        "request.cache.truncate(request.cache.length)",
        ("engine/test_conversation.py::test_caches_hold_what_a_fresh_prefill_holds",),
    ),
    Mutant(
        "a turn keeps a stale tree",
        "model/session.py",
        "            request.tree = Tree()\n            request.node_logits = []\n",
        "",
        (f"{SESSION}::test_a_turn_forgets_what_was_scored_before_it",),
    ),
    Mutant(
        "commit forgets what is pending",
        "model/session.py",
        "request.pending += new[len(path) :]",
        "request.pending = list(new[len(path) :])",
        (f"{SESSION}::test_tokens_from_outside_the_tree_are_caught_up_with",),
    ),
    Mutant(
        "commit keeps stale logits at the root",
        "model/session.py",
        "request.root_logits = request.node_logits[path[-1]]",
        "request.root_logits = request.node_logits[0]",
        (HISTORIES,),
    ),
    Mutant(
        "noise counts rounds, not tokens",
        "model/session.py",
        "request.generated += len(new)",
        "request.generated += 1",
        (HISTORIES,),
    ),
    Mutant(
        "a batch's rows are handed out in another order",
        "model/session.py",
        "scores = {}\n        for number, tree in trees.items():",
        "scores = {}\n        for number, tree in reversed(trees.items()):",
        (HISTORIES,),
    ),
    Mutant(
        "the law of the wrong pending token",
        "model/session.py",
        "forward.logit_rows.extend(range(start + max(waiting - 1, 0), len(forward.ids)))",
        "forward.logit_rows.extend((*range(start, start + (waiting > 0)), "
        "*range(start + waiting, len(forward.ids))))",
        (f"{SESSION}::test_tokens_from_outside_the_tree_are_caught_up_with",),
    ),
    Mutant(
        "wrong parent mask: a node sees the one before it",
        "core/tree.py",
        "mask[node] |= mask[parent]",
        "mask[node] |= mask[node - 1]",
        ("core/test_tree.py::test_paths_depths_and_ancestors_are_the_climb_to_the_root",),
    ),
    Mutant(
        "the pending tokens are hidden from the tree",
        "core/tree.py",
        "*(parent + waiting for parent in tree.parents)",
        "*(parent + waiting if parent >= 0 else ROOT for parent in tree.parents)",
        (HISTORIES,),
    ),
    Mutant(
        "a scored node is taken for another of the same token",
        "core/tree.py",
        "zip(one.tokens, one.parents, strict=True), zip(other.tokens, other.parents, strict=True)",
        "zip(one.tokens, one.tokens, strict=True), zip(other.tokens, other.tokens, strict=True)",
        ("core/test_tree.py::test_shared_counts_leading_nodes_with_equal_token_and_parent",),
    ),
    Mutant(
        "attention in C: a prompt's row sees the next one",
        "model/kernels/kernels.c",
        "c->rows + number + 1;",
        "c->rows + number + 2;",
        (f"{COMPILED}::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    Mutant(
        "attention in C: what was mixed before is not brought to the new maximum",
        "model/kernels/kernels.c",
        "mixed[i * vectors + n] *= shrink[n];",
        "mixed[i * vectors + n] *= 1;",
        (f"{COMPILED}::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    Mutant(
        "attention in C: a bias is added to logits that are of base two",
        "model/kernels/kernels.c",
        "key - before] * (float)LOG2_E;",
        "key - before];",
        (f"{COMPILED}::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    Mutant(
        "attention in C: no key is hidden from a query of a tile",
        "model/kernels/kernels.c",
        "if (own < visible.fewest) visible.fewest = own;",
        "if (own > visible.fewest) visible.fewest = own;",
        (f"{COMPILED}::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    Mutant(
        "kernels in C: tuned for Zen 3, some loops round twice",
        "model/kernels/compiled.py",
        '"--param=avoid-fma-max-bits=0",',
        '"-DNOTHING",',
        (f"{COMPILED}::test_other_processors_vectors_compute_the_same",),
    ),
    Mutant(
        "kernels: what is remembered may be of kernels before a change",
        "model/kernels/__init__.py",
        'key("least", compiled.version(), *facts)',
        'key("least", *facts)',
        ("model/test_kernels.py::test_what_was_measured_is_remembered_for_these_threads",),
    ),
    Mutant(
        "products in C: a bias is taken for a row's own",
        "model/kernels/compiled.py",
        "out if base.dim() > 1 else 0",
        "out",
        ("model/test_kernels.py::test_every_kernel_computes_the_same_product",),
    ),
    Mutant(
        "products in C: a part of many rows stops before its last ones",
        "model/kernels/kernels.c",
        "stop = blocks * (unit / panels + 1) / parts;",
        "stop = blocks * (unit / panels + 1) / parts - (parts > 1);",
        ("model/test_kernels.py::test_every_kernel_computes_the_same_product",),
    ),
    Mutant(
        "products in C: what should be gated is the gate",
        "model/kernels/compiled.py",
        "for half in weight.chunk(2)",
        "for half in reversed(weight.chunk(2))",
        ("model/test_kernels.py::test_every_kernel_computes_the_same_product",),
    ),
    Mutant(
        "towers: a patch attends to those before it alone",
        "model/kernels/tower.py",
        "compiled.attend(q, k, v, all_see, scale)",
        "compiled.attend(q, k, v, None, scale)",
        ("model/test_tower.py::test_a_towers_attention_is_by_the_quicker_kernel",),
    ),
    Mutant(
        "attention in C: padding attends too",
        "model/kernels/kernels.c",
        "counts = r < t.count && row",
        "counts = row",
        (f"{COMPILED}::test_what_rows_attend_to_is_double_precisions",),
    ),
    Mutant(
        "recording in C: rows beside those that are noted count too",
        "model/kernels/kernels.c",
        "row_of(c, t, r) >= c->rows - c->mass_rows;",
        "1;",
        (f"{COMPILED}::test_what_is_noted_on_the_way_is_what_is_attended_to",),
    ),
    Mutant(
        "attention in C: parts of the keys are joined by one maximum",
        "model/kernels/kernels.c",
        "first = power_of_two(merged[tops + n] - top), second",
        "first = power_of_two(top - top), second",
        (f"{COMPILED}::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    Mutant(
        "kernels: a weight tells by one column whether it was changed",
        "model/kernels/__init__.py",
        "    while math.gcd(step, into) > 1:",
        "    while math.gcd(step, into) > into:",
        ("model/test_kernels.py::test_a_weight_tells_of_a_change_to_any_part",),
    ),
    Mutant(
        "changed models: a weight in another place passes",
        "model/fidelity.py",
        "and [*map(Tensor.data_ptr, self._weights)] == self._addresses",
        "and len(self._weights) == len(self._addresses)",
        (
            "model/test_changed_models.py::test_a_changed_target_answers_as_its_own_generate"
            "[norm weight replaced-after first use]",
        ),
    ),
    Mutant(
        "changed models: hooks that are hung in later pass",
        "model/fidelity.py",
        "not any(self._empty)",
        "not any(self._empty[:1])",
        (
            "model/test_changed_models.py::test_a_changed_target_answers_as_its_own_generate"
            "[hook on a layer-after first use]",
        ),
    ),
    Mutant(
        "changed models: a head's logits are the model's",
        "model/backbone.py",
        "        if full.needs_model_for_logits:\n",
        "        if full.needs_model_for_logits is ...:\n",
        ("model/test_changed_models.py::test_laws_are_those_of_the_models_own_logits[granite]",),
    ),
    Mutant(
        "changed models: rows are rotated by their neighbours' length",
        "model/backbone.py",
        "        if not self.rotates_by_length:\n",
        "        if self.rotates_by_length is not None:\n",
        (
            "model/test_changed_models.py::test_answers_do_not_part_where_rotations_depend_on_length[longrope]",
        ),
    ),
    Mutant(
        "towers: copies of weights from before",
        "model/kernels/__init__.py",
        "if self._fingerprints == fingerprints and self._threads == threads:",
        "if self._fingerprints and self._threads == threads:",
        (
            "model/test_tower.py::test_a_towers_weights_changed_in_place_count_from_the_next_prompt_on",
        ),
    ),
    # -- drafts ----------------------------------------------------------------------------------
    Mutant(
        "a malformed tree is not checked",
        "drafting/fallback.py",
        "fault = find_fault(tree, self._vocab)",
        "fault = find_fault(Tree(), self._vocab)",
        (f"{FAULTS}::test_a_draft_that_fails_costs_speed_only",),
    ),
    Mutant(
        "the draft may propose placeholders of media",
        "model/session.py",
        'logits = logits.index_fill(1, self._banned, float("-inf"))',
        'logits = logits.index_fill(1, self._banned[:0], float("-inf"))',
        (f"{BUGS}::test_b16_placeholders_of_media_are_never_drafted",),
    ),
    Mutant(
        "a request of a captured step attends to another's cache",
        "model/cuda_graphs.py",
        "base = first_rows[:, None] + heads * capacities[:, None]",
        "base = first_rows.roll(1)[:, None] + heads * capacities[:, None]",
        ("model/test_cuda_graphs.py::test_several_requests_are_one_step",),
    ),
    Mutant(
        "one captured size's check stands for all",
        "model/cuda_graphs.py",
        "if not kind.agrees(captured, ordinary):",
        "if not self._captured and not kind.agrees(captured, ordinary):",
        ("model/test_cuda_graphs.py::test_each_size_is_held_against_an_ordinary_forward",),
    ),
    Mutant(
        "the rows a size is tried over stay as the trial left them",
        "model/cuda_graphs.py",
        "            part.copy_(old)",
        "            part.copy_(part)",
        ("model/test_cuda_graphs.py::test_a_trial_changes_no_keys",),
    ),
    Mutant(
        "a graph is captured on another GPU's stream",
        "model/cuda_graphs.py",
        "graph, pool=pool, stream=stream, capture_error_mode",
        "graph, pool=pool, capture_error_mode",
        ("gpu/test_captures.py::test_the_second_gpu_is_captured_on_its_own_stream",),
    ),
    Mutant(
        "graphs outlive the memory they point to",
        "model/cache_pool.py",
        "            watcher.forget()",
        "            pass",
        ("model/test_cache_pool.py::test_a_pool_that_moves_takes_its_caches_along",),
    ),
    Mutant(
        "the pool lends rows that are another's",
        "model/cache_pool.py",
        "rest = [(start + rows, stop)] if stop - start > rows else []",
        "rest = [(start + rows - 1, stop)] if stop - start > rows else []",
        ("model/test_cache_pool.py::test_what_is_dropped_is_borrowed_again",),
    ),
    Mutant(
        "costs: a first use is timed",
        "drafting/shapes/cost_measurement.py",
        "time_step(sessions[context], context, rows)  # The capture is not part of the price.",
        "pass",
        ("model/test_cuda_graphs.py::test_what_forwards_cost_is_measured_on_replays",),
    ),
    Mutant(
        "an accepted path is sent to a GPU for each layer",
        "model/cache.py",
        "layer.index_select(1, rows_on[layer.device])",
        "layer.index_select(1, send_to_device(rows, layer.device))",
        ("gpu/test_waits.py::test_an_accepted_path_is_sent_once",),
    ),
    Mutant(
        "kernels of few rows: the mask of a tree is ignored",
        "model/kernels/few_rows_triton.py",
        "visible = (allowed != 0) | (key < seen_by_all)[None, :]",
        "visible = (allowed >= 0) | (key < seen_by_all)[None, :]",
        (f"{FEW_ROWS}::test_requests_of_unlike_lengths_do_not_read_each_other",),
    ),
    Mutant(
        "kernels of few rows: the first split's keys are dropped",
        "model/kernels/few_rows_triton.py",
        "begin = split * share",
        "begin = tl.maximum(split, 1) * share",
        (f"{FEW_ROWS}::test_keys_may_be_split_over_any_number_of_programs",),
    ),
    Mutant(
        "kernels of few rows: keys are normed as queries",
        "model/kernels/few_rows_triton.py",
        "norm = key_norm",
        "norm = query_norm",
        (f"{FEW_ROWS}::test_rotation_norms_and_writing_are_torchs",),
    ),
    Mutant(
        "a tower's windows see each other",
        "model/kernels/windows.py",
        "out = attend_by_flash(q, k, v, borders.to(torch.int32), longest, scale, bool(is_causal))",
        "out = attend_by_flash(q, k, v, borders[[0, -1]].int(), len(q), scale, bool(is_causal))",
        ("model/test_windows.py::test_a_tower_with_windows_sees_in_one_call_a_layer_what_it_saw",),
    ),
    Mutant(
        "captures are in rounds' seconds",
        "core/timing.py",
        "return time.perf_counter() - _stopped.seconds",
        "return time.perf_counter()",
        ("model/test_cuda_graphs.py::test_captures_are_in_no_rounds_seconds",),
    ),
    Mutant(
        "a captured step reads a key after the last of a row's",
        "model/batch_invariant.py",
        "futures = column.view(-1, 1, BLOCK) > places[0][:, None]",
        "futures = column.view(-1, 1, BLOCK) > places[0][:, None] + 1",
        ("model/test_batch_invariant.py::test_captured_forwards_give_the_same_bits",),
    ),
    Mutant(
        "the ensemble's weights are not normalised",
        "methods/tabed.py",
        "return grid(state.views)[best]",
        "return (1.0, *grid(state.views)[best][1:])",
        ("methods/test_tabed.py::test_every_round_is_algorithm_1",),
    ),
    Mutant(
        "tokens of an older job are heard",
        "drafting/parallel/process.py",
        "if job == self._job:",
        "if job <= self._job:",
        (f"{PARALLEL}::test_a_message_of_an_older_job_is_not_returned",),
    ),
    Mutant(
        "tokens of a refused chain are heard",
        "drafting/parallel/drafter.py",
        "if epoch >= draft.valid_from:",
        "if epoch >= 0:",
        (f"{PARALLEL}::test_every_token_in_flight_is_the_drafts_own",),
    ),
    # -- the draft's process ---------------------------------------------------------------------
    Mutant(
        "a worker is given back as often as its answer is closed",
        "drafting/parallel/process.py",
        "if self._unclosed.detach() is not None:",
        "if self._unclosed.detach() is not None or True:",
        ("engine/test_abandoned.py::test_a_lending_ends_once_and_for_all",),
    ),
    Mutant(
        "a worker outlives its parent while it is at a step",
        "drafting/parallel/child.py",
        "    while os.getppid() == parent:",
        "    while True:",
        ("engine/test_abandoned.py::test_a_worker_ends_with_its_parent[60.0]",),
    ),
    Mutant(
        "a closed answer's draft is merely told to stop",
        "drafting/parallel/process.py",
        "        while patience:",
        "        while False:",
        ("engine/test_abandoned.py::test_a_closed_answer_leaves_no_draft_at_work",),
    ),
    Mutant(
        "a message's empty tensor and its neighbour are taken for one",
        "drafting/parallel/channel.py",
        "= len(self.storages), self.size",
        "= self.size, self.size",
        ("drafting/test_channel.py::test_tensors_arrive_as_they_were",),
    ),
    Mutant(
        "a draft's process that fails hands nothing over",
        "drafting/parallel/drafter.py",
        "            raise DraftFailed(chains) from self._failure",
        "            raise DraftFailed({}) from self._failure",
        ("laws/test_failing_workers.py",),
    ),
    Mutant(
        "a draft's process computes with a token before it publishes it",
        "drafting/parallel/child.py",
        "            self._publish(request, draft, longer)\n            draft.chain = longer\n",
        "            draft.chain = longer\n            self._session.score({request: longer})\n"
        "            self._publish(request, draft, longer)\n",
        ("laws/test_failing_workers.py",),
    ),
    Mutant(
        "weights are laid out anew for every number of threads that returns",
        "model/kernels/__init__.py",
        "        if choice not in self._tables:\n            for name in set(choice.names) - "
        "self._prepared.keys():",
        "        if True:\n            for name in set(choice.names):",
        ("engine/test_predecessors.py::test_no_weights_are_laid_out_on_the_clock_of_any_method",),
    ),
    Mutant(
        "the target's fewer threads stay with whoever reads the stream",
        "drafting/parallel/drafter.py",
        "            if torch.get_num_threads() != before:",
        "            if False:",
        ("engine/test_abandoned.py::test_the_threads_between_two_rounds_are_the_callers",),
    ),
    # -- exact -----------------------------------------------------------------------------------
    Mutant(
        "exact: a forward is not padded",
        "model/batch_invariant.py",
        "spare = ROWS - (segment.stop - segment.start)",
        "spare = 0",
        ("model/test_batch_invariant.py::test_any_way_through_a_text_gives_the_same_bits",),
    ),
    # -- the law: what is drawn stands, and no number is drawn twice -------------------------------
    Mutant(
        "auto: a draw that the draft gave little is taken back",
        "drafting/shapes/auto.py",
        "            law, odds, alternatives = _look(scores, last, self.runners)\n",
        "            law, odds, alternatives = _look(scores, last, self.runners)\n"
        "            token, q = scores.draw(last, law)\n"
        "            odds = odds if q is None else float(q[token])\n",
        (LATE_AUTO, EARLY_AUTO),
    ),
    Mutant(
        "noise: a draft after a refusal draws by the refused one's numbers",
        "core/sampling.py",
        "began = self.offset if self.draft_start is None else self.draft_start",
        "began = 0",
        (f"{LAW}::test_no_number_is_used_for_two_draws",),
    ),
    Mutant(
        "noise: a draft in its own process does not begin anew",
        "drafting/parallel/child.py",
        "                draft.start = draft.answer_tokens\n",
        "                draft.start = 0\n",
        (f"{LAW}::test_no_number_is_used_for_two_draws",),
    ),
    Mutant(
        "the first batch takes along what happens to be there",
        "drafting/parallel/drafter.py",
        "draft.next_count = self._length if self._samples else len(draft.chain)",
        "draft.next_count = len(draft.chain)",
        (f"{LAW}::test_a_parallel_draft_of_any_speed_gives_the_same_rows_and_tokens",),
    ),
    Mutant(
        "auto: when sampling, a round costs what was drawn beyond a refusal too",
        "drafting/shapes/auto.py",
        'levels = len(round.verdict.accepted) + (round.verdict.kind == "recovered")',
        "levels = len(round.tree)",
        (f"{CONTROL}::test_what_was_drawn_beyond_a_refusal_teaches_nothing",),
    ),
    Mutant(
        "auto: when sampling, seconds count",
        "drafting/shapes/auto.py",
        "        if not round.p.rules.sample:\n            return sum(",
        "        if True:\n            return sum(",
        (f"{CONTROL}::test_what_is_sampled_does_not_depend_on_how_fast_it_was",),
    ),
    Mutant(
        "auto: when sampling, slow verifying stretches the costs",
        "drafting/shapes/auto.py",
        "if round.p.rules.sample or round.verify_seconds <= 0:",
        "if round.verify_seconds <= 0:",
        (f"{CONTROL}::test_what_is_sampled_does_not_depend_on_how_fast_it_was",),
    ),
    # -- the controller, costs and fitted shapes ---------------------------------------------------
    Mutant(
        "auto: runners-up stand beside a draft that reaches the answer's end",
        "drafting/shapes/auto.py",
        "                return tree\n            reach",
        "                break\n            reach",
        (f"{CONTROL}::test_no_draft_goes_on_after_the_end_of_an_answer",),
    ),
    Mutant(
        "every law: a token is read off NaN",
        "core/sampling.py",
        "self.law if NO_TOKEN in likeliest else dict",
        "dict",
        ("core/test_sampling.py::test_every_law_is_the_law_at_each_node",),
    ),
    Mutant(
        "what is remembered is read once and for all",
        "core/home.py",
        "_read(self._path, state.st_ino, state.st_mtime_ns, state.st_size)",
        "_read(self._path)",
        ("core/test_home.py::test_what_others_remember_is_seen_and_a_file_is_read_once",),
    ),
    Mutant(
        "auto: drafting that was given up is never tried again",
        "drafting/shapes/auto.py",
        "is_retry = is_retry_due and",
        "is_retry = False and",
        (f"{CONTROL}::test_it_is_tried_again_ever_more_seldom_and_comes_back",),
    ),
    Mutant(
        "auto: patience does not grow",
        "drafting/shapes/auto.py",
        "min(MAX_RETRY_AFTER_ROUNDS, 8 * estimates.retry_after)",
        "RETRY_AFTER_ROUNDS",
        (f"{CONTROL}::test_it_is_tried_again_ever_more_seldom_and_comes_back",),
    ),
    Mutant(
        "auto: runners-up cost nothing",
        "drafting/shapes/auto.py",
        "gain - tokens_a_second * (seconds - verify[0])",
        "gain - 0 * (seconds - verify[0])",
        (f"{CONTROL}::test_a_runner_up_is_not_drafted_over_a_step_of_the_verifying_time",),
    ),
    Mutant(
        "auto: a cut answer counts as a refusal",
        "drafting/shapes/auto.py",
        "        if accepted is None and round.verdict.own is None:\n            break",
        "        if False:\n            break",
        (f"{CONTROL}::test_an_answer_cut_short_refuses_nothing",),
    ),
    Mutant(
        "first token: the draft is not told it",
        "engine/request_batch.py",
        "            self.drafter.commit({request: opened[request].tokens for request in staying})",
        "            pass",
        ("engine/test_greedy.py::test_a_target_drafting_for_itself_accepts_everything",),
    ),
    Mutant(
        "first token: a draft that began early waits for a whole head start",
        "drafting/parallel/drafter.py",
        "            first = draft.next_count is None",
        "            first = False",
        ("methods/test_hippo.py::test_the_head_start_is_as_long_as_the_targets_prefill",),
    ),
    Mutant(
        "auto: a draft without a clue is dropped no sooner",
        "drafting/shapes/auto.py",
        "judged += max(1.0, -log(max(odds[first], LEAST_CONFIDENCE)) - 1)",
        "judged += 1.0",
        (f"{CONTROL}::test_a_draft_that_says_itself_it_knows_nothing_is_dropped_sooner",),
    ),
    Mutant(
        "auto: the best chain is the longest",
        "drafting/shapes/auto.py",
        "if tokens * best[1] > best[0] * seconds:",
        "if tokens > best[0]:",
        (f"{CONTROL}::test_a_useless_draft_costs_next_to_nothing",),
    ),
    Mutant(
        "costs: beyond the last point T stays what it is",
        "core/costs.py",
        "return high + (high - low) * (rows - b) / (b - a)",
        "return high",
        (f"{COST}::test_costs_are_linear_between_and_beyond_the_measured_points",),
    ),
    Mutant(
        "costs: an expected chain forgets the target's own token",
        "drafting/shapes/fit.py",
        "return sum(rate**i for i in range(length + 1))",
        "return sum(rate**i for i in range(1, length + 1))",
        (f"{COST}::test_expected_chain_is_the_geometric_sum_of_the_paper",),
    ),
    Mutant(
        "costs: a cut round counts as a refusal",
        "drafting/shapes/fit.py",
        'refused = round.verdict.kind == "recovered"',
        'refused = round.verdict.kind != "bonus"',
        (f"{COST}::test_a_round_cut_by_a_stop_is_no_refusal",),
    ),
    Mutant(
        "costs: fit forgets nothing",
        "drafting/shapes/fit.py",
        "return Rate(self.hits * memory + hits, self.tries * memory + tries)",
        "return Rate(self.hits + hits, self.tries + tries)",
        (f"{COST}::test_fit_folds_the_rate_towards_what_it_sees_and_forgets",),
    ),
    Mutant(
        "costs: fit pays for one draft forward only",
        "drafting/shapes/fit.py",
        "(n, expected_chain(rate, n), n, n + 1)",
        "(n, expected_chain(rate, n), 1, n + 1)",
        (f"{COST}::test_fit_chooses_what_a_search_over_everything_chooses",),
    ),
    Mutant(
        "costs: few points are kept for good",
        "drafting/shapes/cost_measurement.py",
        'stored["used"] >= ANSWERS_BEFORE_ALL_POINTS and',
        'stored["used"] > ANSWERS_BEFORE_ALL_POINTS and',
        (f"{COST}::test_what_is_used_often_is_timed_at_every_point",),
    ),
    Mutant(
        "costs: of several timings the slowest counts",
        "drafting/shapes/cost_measurement.py",
        "return [min(times) for times in zip(*repeats, strict=True)]",
        "return [max(times) for times in zip(*repeats, strict=True)]",
        (f"{COST}::test_bare_forwards_are_taken_in_turns_and_the_quickest_counts",),
    ),
    Mutant(
        "costs: who shares a forward pays for all of it",
        "core/costs.py",
        "each = [self.verify_together(requests, requests * rows) / requests for rows in self.rows]",
        "each = [self.verify_together(requests, requests * rows) for rows in self.rows]",
        (f"{COST}::test_shared_costs_are_a_part_of_the_whole",),
    ),
    Mutant(
        "costs: fit never doubts what it once believed dear",
        "drafting/shapes/fit.py",
        "max(here, each - EXTRA_COST_DECAY * (each - here))",
        "max(here, each)",
        (f"{COST}::test_costs_of_a_busy_moment_fade_within_an_answer",),
    ),
    Mutant(
        "attention: a forward's first rows are written down for its last",
        "model/kernels/attention_mass.py",
        "q[:, -self.last :]",
        "q[:, : self.last or None]",
        ("model/test_decoder.py::test_a_prompts_last_layer_computes_what_is_wanted_alone",),
    ),
    Mutant(
        "recording in C: weights stay relative to the maximum as it was",
        "model/kernels/kernels.c",
        "power_of_two(shrink[block * vectors + n] - highest[n])",
        "power_of_two((lanes){0})",
        ("model/test_compiled.py::test_what_is_noted_on_the_way_is_what_is_attended_to",),
    ),
    Mutant(
        "recording: what the last layer attends to is not told",
        "model/attention.py",
        "1 if segment.recorder is None else segment.recorder.last",
        "1",
        ("model/test_attention.py::test_a_note_is_the_same_on_the_way_and_after",),
    ),
    Mutant(
        "kernels: the first measurement decides for good",
        "model/kernels/__init__.py",
        "min(seconds, old[name])",
        "old[name]",
        ("model/test_kernels.py::test_a_busy_moment_does_not_decide_for_good_how_to_multiply",),
    ),
    Mutant(
        "kernels: every copy is kept",
        "model/kernels/__init__.py",
        "if without[needless] > 1 + MIN_SAVING:",
        "if without[needless] > 1:",
        ("model/test_kernels.py::test_a_copy_that_saves_little_is_not_kept",),
    ),
    # -- schedules ---------------------------------------------------------------------------------
    Mutant(
        "a chain looks at what it drew before it stops",
        "drafting/shapes/policies.py",
        "        if len(tree) and not self.goes_on(scores, last, law):\n"
        "            return None\n"
        "        token, q = scores.draw(last, law)\n",
        "        token, q = scores.draw(last, law)\n"
        "        if len(tree) and q is not None and float(q[token]) < 0.5:\n"
        "            return None\n",
        (f"{LAW}::test_the_next_three_tokens_have_exactly_the_targets_law_at_the_start",),
    ),
    Mutant(
        "a draft that paused never goes on",
        "drafting/parallel/child.py",
        "            draft.paused = draft.paused and len(draft.chain) > 0\n",
        "",
        (f"{SIXTH}::test_it_answers_as_the_target_alone",),
    ),
    Mutant(
        "a second file takes a name over",
        "methods/registry.py",
        "            if name in table:\n",
        "            if False:\n",
        (f"{SIXTH}::test_two_files_may_not_bring_one_name",),
    ),
    Mutant(
        "scheduler: a short prompt costs its newcomer a round",
        "engine/scheduler.py",
        "left -= min(1.0, len(batch.request.ids[0]) / batch.session.chunk)",
        "left -= 1.0",
        (SHORT_PROMPTS,),
    ),
    Mutant(
        "scheduler: newcomers hold up those who decode",
        "engine/scheduler.py",
        "left -= min(1.0, len(batch.request.ids[0]) / batch.session.chunk)",
        "left -= 0.0",
        (SHORT_PROMPTS,),
    ),
    Mutant(
        "scheduler: who came first takes part in every round",
        "engine/scheduler.py",
        "self._entries[number] = self._entries.pop(number)",
        "pass",
        ("engine/test_scheduler.py::test_rounds_of_a_few_are_taken_in_turns",),
    ),
    Mutant(
        "pace: turns are taken whatever they cost",
        "engine/round_size.py",
        "max(1, cheap, (patience - fixed) / each)",
        "max(1, (patience - fixed) / each)",
        (f"{PACE}::test_a_round_is_as_short_as_is_cheap_and_no_shorter_than_anybody_waits",),
    ),
    Mutant(
        "pace: rounds of few tell of rounds of many",
        "engine/round_size.py",
        "if live > max(self.seconds, default=0):",
        "if not self.seconds:",
        (f"{PACE}::test_more_than_ever_are_tried_together",),
    ),
    Mutant(
        "pace: the last round is all that is believed",
        "engine/round_size.py",
        "old + NEW_ROUND_WEIGHT * (seconds - old)",
        "seconds",
        (f"{PACE}::test_what_rounds_took_lately_counts",),
    ),
    Mutant(
        "once: the last object alone tells what was asked",
        "core/once.py",
        "*path, last = arguments",
        "*path, last = arguments[-1:]",
        ("core/test_once.py::test_every_row_of_objects_has_an_answer_of_its_own_worked_out_once",),
    ),
    Mutant(
        "schedule: a broken law ends every request",
        "drafting/schedule.py",
        'verdicts[request], endings[request] = EMPTY_VERDICT, "error"\n            continue',
        "raise",
        ("engine/test_scheduler.py::test_a_target_of_nan_ends_one_request_alone",),
    ),
    Mutant(
        "schedule: what is cut away stays in the verdict",
        "drafting/schedule.py",
        "return Verdict(verdict.path[:count], verdict.accepted[:count], None, None)",
        "return Verdict(verdict.path, verdict.accepted, None, None)",
        ("engine/test_parallel.py::test_an_answer_ends_wherever_it_should", HISTORY_ENDS),
    ),
    Mutant(
        "schedule: the token drafted beside those in flight is not judged with it",
        "drafting/schedule.py",
        "        trees = draft.extend(in_flight)\n",
        "        draft.extend(in_flight)\n        trees = in_flight\n",
        ("methods/test_hippo.py::test_every_round_judges_by_the_papers_rule",),
    ),
    # -- saliency ----------------------------------------------------------------------------------
    Mutant(
        "saliency: a budget is rounded down",
        "drafting/views/saliency.py",
        "else tokens * keep + 0.5)",
        "else tokens * keep)",
        (f"{SALIENCY}::test_budget_rounds_and_leaves_at_least_one",),
    ),
    Mutant(
        "saliency: the mass reached leaves out the token that reaches it",
        "drafting/views/saliency.py",
        "count = int((before < threshold).sum())",
        "count = int((before < threshold).sum()) - 1",
        (f"{SALIENCY}::test_top_mass_is_the_smallest_top_set_that_reaches_the_share",),
    ),
    Mutant(
        "saliency: even samples begin at the edge",
        "drafting/views/saliency.py",
        "at = ((torch.arange(count) * 2 + 1) * len(items)) // (2 * count)",
        "at = (torch.arange(count) * len(items)) // count",
        (f"{SALIENCY}::test_spread_is_even",),
    ),
    Mutant(
        "saliency: of temporal neighbours only the one before",
        "drafting/views/saliency.py",
        "for step in (1, -1):",
        "for step in (-1,):",
        ("methods/test_hippo.py::test_temporal_and_spatial_are_eq_3_to_6",),
    ),
    Mutant(
        "saliency: scaled over the video instead of each frame",
        "drafting/views/saliency.py",
        "_, frame = torch.unique(grid[:, :2], dim=0, return_inverse=True)",
        "_, frame = torch.unique(grid[:, :1], dim=0, return_inverse=True)",
        ("methods/test_hippo.py::test_scores_are_z_scored_within_their_frame",),
    ),
    Mutant(
        "saliency: heads are summed up by the largest",
        "drafting/views/saliency.py",
        "return mass.mean((0, 1))",
        "return mass.amax((0, 1))",
        (f"{SALIENCY}::test_attention_averages_layers_and_heads",),
    ),
    # -- SAGE and HIPPO ----------------------------------------------------------------------------
    Mutant(
        "sage: entropy in bits over nats",
        "methods/sage.py",
        "return 1.0 - entropy / math.log(k)",
        "return 1.0 - entropy / math.log2(k)",
        (f"{SAGE}::test_one_law_plans_the_next_tree_ties_included",),
    ),
    Mutant(
        "sage: a confident draft gets a wide tree",
        "methods/sage.py",
        "(least + (1 - self.alpha) * (most - least))",
        "(least + self.alpha * (most - least))",
        (f"{SAGE}::test_any_laws_give_the_papers_tree",),
    ),
    Mutant(
        "sage: the threshold does not grow with the level",
        "methods/sage.py",
        "self.shape.theta * level / self.deep",
        "self.shape.theta / self.deep",
        (f"{SAGE}::test_any_laws_give_the_papers_tree",),
    ),
    Mutant(
        "sage: theta decides who is included, whatever the rule",
        "methods/sage.py",
        'if self.shape.rule == "prose":\n',
        "if False:\n",
        (f"{SAGE}::test_any_laws_give_the_papers_tree",),
    ),
    Mutant(
        "sage: the window forgets nothing",
        "methods/sage.py",
        "(*state.recent, len(round.verdict.accepted))[-self.window :]",
        "(*state.recent, len(round.verdict.accepted))",
        (f"{SAGE}::test_the_history_moves_the_deepest_depth_by_the_rule",),
    ),
    Mutant(
        "hippo: without the score of space",
        "methods/hippo.py",
        "        if self.spa:\n",
        "        if False:\n",
        ("methods/test_hippo.py::test_the_holistic_score_is_eq_7",),
    ),
    Mutant(
        "hippo: attention is not scaled within its frame",
        "methods/hippo.py",
        "total += saliency.per_frame(guide.to(grid.device), grid)",
        "total += guide.to(grid.device)",
        ("methods/test_hippo.py::test_the_holistic_score_is_eq_7",),
    ),
    Mutant(
        "a law of NaN is taken for a token",
        "core/sampling.py",
        "        if bool(law[0].isnan()):  # One NaN spreads over the whole softmax.\n"
        '            raise BrokenLaw("the logits hold NaN")\n',
        "        if bool(law[0].isnan()):\n            return 0\n",
        (f"{SAMPLING}::test_a_law_of_nan_is_refused_when_sampling_too",),
    ),
    # -- formats, and what is kept ---------------------------------------------------------------
    Mutant(
        "a grammar is not told of the draft's path",
        "core/sampling.py",
        "return [*self.context[len(self.context) - self.offset :], *self._below(node)]",
        "return list(self.context[len(self.context) - self.offset :])",
        ("serve/test_formats.py::test_drafts_see_what_answers_may_hold",),
    ),
    Mutant(
        "a grammar's parser believes it read what it refused",
        "serve/formats/grammar.py",
        "self._parsed_ids = list(answer[: same + consumed])",
        "self._parsed_ids = list(answer)",
        ("serve/test_formats.py::test_a_grammar_is_a_function_of_the_answer",),
    ),
    Mutant(
        "what is kept: positions do not count",
        "model/prefix_cache.py",
        "    equal &= (one.positions[:, :length] == other.positions[:, :length]).all(0)\n",
        "",
        (f"{PREFIX_CACHE}::test_a_prompt_is_known_by_its_rows",),
    ),
    Mutant(
        "what is kept: another model's keys",
        "model/prefix_cache.py",
        "is_own = isinstance(value, CachedPrompt) and value.owner is self._owner",
        "is_own = isinstance(value, CachedPrompt)",
        (f"{PREFIX_CACHE}::test_a_prompt_that_goes_on_takes_the_place_of_its_beginning",),
    ),
    Mutant(
        "what is kept: attention to be written down is not computed",
        "model/session.py",
        "first_needed = int(text[0]) if recorded_columns and len(text) else len(prompt)",
        "first_needed = len(prompt)",
        (f"{PREFIX_CACHE}::test_laws_and_what_is_written_down_are_a_whole_readings",),
    ),
    # -- what follows the answer -----------------------------------------------------------------
    Mutant(
        "fresh: a row is said to see a key less",
        "model/session.py",
        "visible_keys = committed_rows + depth + 1",
        "visible_keys = committed_rows + depth",
        (FRESH_LOOKS,),
    ),
    Mutant(
        "fresh: refused rows count",
        "model/session.py",
        "for depth, node in enumerate(path):\n                    visible_keys",
        "for depth, node in enumerate(range(len(request.node_queries))):\n"
        "                    visible_keys",
        (FRESH_LOOKS,),
    ),
    Mutant(
        "fresh: newcomers take the places of other layers",
        "model/cache.py",
        "at = (layer == number).nonzero().squeeze(-1) if count else layer[:0]",
        "at = (layer != number).nonzero().squeeze(-1)[:count] if count else layer[:0]",
        ("methods/test_fresh.py::test_an_exchanged_cache_holds_what_one_made_anew_would",),
    ),
    Mutant(
        "fresh: chosen by the attention at prefill",
        "drafting/drafters.py",
        "newer, present = prefill.with_latest_attention(), pruned.chosen_mask(prefill.prompt)",
        "newer, present = prefill, pruned.chosen_mask(prefill.prompt)",
        ("methods/test_fresh.py::test_each_round_drafts_on_the_keys_looked_at_last",),
    ),
    Mutant(
        "pages: those that are asked for the least",
        "model/cache.py",
        ".topk(self._pages_per_step).indices",
        ".topk(self._pages_per_step, largest=False).indices",
        (PAGES_STEP,),
    ),
    Mutant(
        "pages: rows of a forward share what the first asks for",
        "model/cache.py",
        "            self.load(cache, layer, row_q * scale)",
        "            self.load(cache, layer, q[:, :1] * scale)",
        ("methods/test_pages.py::test_a_law_is_of_its_path",),
    ),
    Mutant(
        "pages: a page goes by its first key",
        "model/cache.py",
        "keys[:, rows].mean(2)",
        "keys[:, rows[:, 0]]",
        (PAGES_STEP,),
    ),
    Mutant(
        "documents: a batch's padding is counted",
        "engine/request.py",
        "places = real[row].nonzero().squeeze(-1)",
        "places = torch.arange(ids.shape[1])",
        (
            "engine/test_documents.py"
            "::test_spans_of_a_padded_batch_count_from_each_prompts_own_beginning",
        ),
    ),
    # -- what people and clients give ------------------------------------------------------------
    Mutant(
        "words: only special tokens are control tokens",
        "inputs/literal_text.py",
        'return len(content) > 1 and bool(content.replace(BLANK, " ").strip())',
        "return False",
        (f"{HOSTILE}::test_added_tokens_that_are_not_special_stay_words",),
    ),
    Mutant(
        "words: each part is looked at by itself",
        "inputs/literal_text.py",
        "if _control_tokens(processor, written) != _control_tokens(processor, template):",
        "if False:",
        (f"{HOSTILE}::test_parts_together_spell_no_control_token[qwen2.5-vl-image]",),
    ),
    Mutant(
        "stop strings: special tokens are taken out first",
        "core/stopping.py",
        "for decoder in (decode, spell) if decoder is not None",
        "for decoder in (decode,) if decoder is not None",
        ("engine/test_special_stops.py",),
    ),
    Mutant(
        "display matrix: a mirror is a turn",
        "inputs/media/video.py",
        "-1 if from_x < 0 else 1",
        "-1 if from_y < 0 else 1",
        ("inputs/test_media.py::test_v13_every_display_matrix",),
    ),
    Mutant(
        "tool calls: the first closing mark ends a call",
        "serve/formats/tool_calls.py",
        "members, end = read_object(text, inside)",
        "members, end = read_object(text[: text.find(dialect.closing) % (len(text) + 1)], inside)",
        ("serve/test_formats.py::test_words_and_calls_are_told_apart",),
    ),
    Mutant(
        "replayed messages: silent fields are refused",
        "serve/request_schema.py",
        'if name in fields or not (field is None or field in ("", [], {}))',
        "if True",
        ("serve/test_replay.py::test_other_messages_and_parts_may_be_silent_too",),
    ),
    Mutant(
        "no home: a folder that others may write is used",
        "core/home.py",
        "stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not others_may_write",
        "stat.S_ISDIR(state.st_mode)",
        ("cli/test_places.py::test_a_folder_that_is_not_theirs_alone_is_not_used",),
    ),
    # -- calibrating -----------------------------------------------------------------------------
    Mutant(
        "calibrate: what beats plain decoding replaces auto",
        "bench/calibrate.py",
        "if _is_faster(other, auto, 1 + TIE_MARGIN) and _is_faster(other, plain, 1):",
        "if _is_faster(other, plain, 1):",
        (f"{CALIBRATE}::test_what_the_verdict_is",),
    ),
    Mutant(
        "calibrate: confirmed on the videos that chose",
        "bench/calibrate.py",
        "confirming_videos = [*held_out_videos] * MAX_CONFIRMING_RUNS",
        "confirming_videos = [*search_videos] * MAX_CONFIRMING_RUNS",
        (f"{CALIBRATE}::test_what_is_reported_chose_nothing",),
    ),
    # -- control ---------------------------------------------------------------------------------
    Mutant(
        "control: a renamed variable",
        "core/verify.py",
        "    left = p.clone()\n    if isinstance(q, int):\n        left[q] = 0.0\n    else:\n"
        "        left[: q.shape[0]] -= q.to(left)\n        left.clamp_(min=0.0)\n"
        '    total: Float[Tensor, ""] = left.sum()\n'
        "    return left / total if bool(total > 0) and bool(torch.isfinite(total)) else p",
        "    rest = p.clone()\n    if isinstance(q, int):\n        rest[q] = 0.0\n    else:\n"
        "        rest[: q.shape[0]] -= q.to(rest)\n        rest.clamp_(min=0.0)\n"
        '    total: Float[Tensor, ""] = rest.sum()\n'
        "    return rest / total if bool(total > 0) and bool(torch.isfinite(total)) else p",
        (VERIFY, SAMPLING),
        survives=True,
    ),
)
