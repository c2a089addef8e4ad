"""Bugs in the session of a model, its cache and what looks at the model itself."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "positions of drafted tokens are off by one",
        "model/session.py",
        within="Session._add_new_rows",
        find="$end - 1 + $depth",
        plant="$end + $depth",
        tests=("engine/test_position_ids.py::test_verified_rows_stand_where_generate_puts_them",),
    ),
    PlantedBug(
        "positions of pending tokens are off by one",
        "model/session.py",
        within="Session._add_new_rows",
        find="range($end - $waiting, $end)",
        plant="range($end - $waiting + 1, $end + 1)",
        tests=("engine/test_position_ids.py::test_verified_rows_stand_where_generate_puts_them",),
    ),
    PlantedBug(
        "text after a video goes on from the largest position of the prompt",
        "model/prompt_reader.py",
        find="int($places[:, -1].max())",
        plant="int($places.max())",
        tests=(
            "engine/test_greedy.py::"
            "test_text_goes_on_from_the_last_token_however_far_the_videos_time_went",
        ),
    ),
    PlantedBug(
        "the key of a rejected token stays in the cache",
        "model/session.py",
        find="$request.cache.commit_path($path)",
        plant=(
            "$request.cache.commit_path(range(len($path) + (len($path) < "
            "len($request.node_logits))))"
        ),
        tests=("model/test_session.py::test_any_history_of_trees_and_commits_equals_the_oracle",),
    ),
    PlantedBug(
        "the cache keeps the first keys of a tree instead of the accepted path's",
        "model/cache.py",
        find="torch.tensor($path[$in_place:])",
        plant="torch.arange($in_place, len($path))",
        tests=("model/test_session.py::test_any_history_of_trees_and_commits_equals_the_oracle",),
    ),
    PlantedBug(
        "keys stay when a conversation takes tokens back",
        "model/session.py",
        within="Session.start_turn",
        find="$request.prompt_rows[0] + $cached_tokens",
        plant="$request.cache.length",
        tests=("engine/test_conversation_reuse.py::test_caches_hold_what_a_fresh_prefill_holds",),
    ),
    PlantedBug(
        "a new turn keeps the tree of the turn before",
        "model/session.py",
        find="""
            $request.tree = Tree()
            $request.node_logits = []
            $request.root_logits = None
        """,
        plant="$request.root_logits = None",
        tests=("model/test_session.py::test_a_turn_forgets_what_was_scored_before_it",),
    ),
    PlantedBug(
        "commit forgets the tokens that are still pending",
        "model/session.py",
        find="$request.pending += $new[len($path):]",
        plant="$request.pending = list($new[len($path):])",
        tests=("model/test_session.py::test_tokens_from_outside_the_tree_are_caught_up_with",),
    ),
    PlantedBug(
        "commit keeps another node's logits at the root",
        "model/session.py",
        within="Session.commit",
        find="$request.root_logits = $request.node_logits[$path[-1]]",
        plant="$request.root_logits = $request.node_logits[0]",
        tests=(
            "model/test_session.py::"
            "test_a_commit_of_drafted_tokens_alone_ends_with_the_law_of_the_last",
        ),
    ),
    PlantedBug(
        "the count of generated tokens grows by one a round",
        "model/session.py",
        find="$request.answer_length += len($new)",
        plant="$request.answer_length += 1",
        tests=("model/test_session.py::test_any_history_of_trees_and_commits_equals_the_oracle",),
    ),
    PlantedBug(
        "rows of a batch are handed to the requests in reverse order",
        "model/session.py",
        within="Session._scores",
        find="$trees.items()",
        plant="reversed($trees.items())",
        tests=("model/test_session.py::test_any_history_of_trees_and_commits_equals_the_oracle",),
    ),
    PlantedBug(
        "the logits of the first pending token are returned instead of the last's",
        "model/session.py",
        find="range($start + max($waiting - 1, 0), len($forward.ids))",
        plant=(
            "(*range($start, $start + ($waiting > 0)), *range($start + $waiting, "
            "len($forward.ids)))"
        ),
        tests=("model/test_session.py::test_tokens_from_outside_the_tree_are_caught_up_with",),
    ),
    PlantedBug(
        "changed models: a replaced weight is not noticed",
        "model/change_detection.py",
        find="[*map(Tensor.data_ptr, self._weights)] == self._addresses",
        plant="len(self._weights) == len(self._addresses)",
        tests=(
            "model/test_changed_models.py::test_a_changed_target_answers_as_its_own_generate"
            "[norm weight replaced-after first use]",
        ),
    ),
    PlantedBug(
        "changed models: hooks registered later are not noticed",
        "model/change_detection.py",
        find="any(self._empty)",
        plant="any(self._empty[:1])",
        tests=(
            "model/test_changed_models.py::test_a_changed_target_answers_as_its_own_generate"
            "[hook on a layer-after first use]",
        ),
    ),
    PlantedBug(
        "changed models: what the model does to its head's logits is left out",
        "model/backbone.py",
        find="""
            if $full.needs_model_for_logits:
                return $full._logits_of_model($hidden)
        """,
        plant="pass",
        tests=(
            "model/test_logits_and_rotations.py::test_laws_are_those_of_the_models_own_logits[granite]",
        ),
    ),
    PlantedBug(
        "changed models: a row's rotation depends on its neighbours' length",
        "model/backbone.py",
        within="Backbone._use_lengths_for_rotary",
        find="not self.rotates_by_length",
        plant="self.rotates_by_length is not None",
        tests=(
            "model/test_logits_and_rotations.py::"
            "test_answers_do_not_part_where_rotations_depend_on_length"
            "[longrope]",
        ),
    ),
    PlantedBug(
        "the draft may propose placeholders of images and videos",
        "model/session.py",
        find="$logits.index_fill(1, self._banned, float('-inf'))",
        plant="$logits.index_fill(1, self._banned[:0], float('-inf'))",
        tests=("engine/test_media_placeholders.py::test_placeholders_of_media_are_never_drafted",),
    ),
    PlantedBug(
        "an accepted path is copied to the GPU once for each layer",
        "model/cache.py",
        find="$rows_on[$layer.device, $first]",
        plant="send_to_device(rows - $first, $layer.device)",
        tests=("gpu/test_waits.py::test_an_accepted_path_is_sent_once",),
    ),
    PlantedBug(
        "batch invariance: a captured step reads one key too many",
        "model/batch_invariant.py",
        find="$column > $places[0][:, None]",
        plant="$column > $places[0][:, None] + 1",
        tests=("model/test_batch_invariant.py::test_captured_forwards_give_the_same_bits",),
    ),
    PlantedBug(
        "batch invariance: a forward is not padded to its fixed size",
        "model/batch_invariant.py",
        find="ROWS - ($segment.stop - $segment.start)",
        plant="0",
        tests=("model/test_batch_invariant.py::test_any_way_through_a_text_gives_the_same_bits",),
    ),
    PlantedBug(
        "recorded attention: the last layer records one row only",
        "model/attention.py",
        find="1 if $segment.recorder is None else $segment.recorder.rows_to_chunk_end",
        plant="1",
        tests=("model/test_attention.py::test_a_note_is_the_same_on_the_way_and_after",),
    ),
    PlantedBug(
        "prefix cache: prompts with other positions count as equal",
        "model/prefix_cache.py",
        find="$equal &= ($one.positions[:, :$length] == $other.positions[:, :$length]).all(0)",
        plant="pass",
        tests=("engine/test_prefix_cache.py::test_a_prompt_is_known_by_its_rows",),
    ),
    PlantedBug(
        "prefix cache: rows of early layers are compared where only one prompt has them",
        "model/prefix_cache.py",
        find="$one.media.deepstack and $other.media.deepstack",
        plant="$one.media.deepstack or $other.media.deepstack",
        tests=(
            "engine/test_prefix_cache.py::"
            "test_a_prompt_of_words_and_one_with_a_picture_share_their_first_words",
        ),
    ),
    PlantedBug(
        "prefix cache: another model's keys are used",
        "model/prefix_cache.py",
        find="isinstance($value, CachedPrompt) and $value.owner is self._owner",
        plant="isinstance($value, CachedPrompt)",
        tests=(
            "engine/test_prefix_cache.py::"
            "test_a_prompt_that_goes_on_takes_the_place_of_its_beginning",
        ),
    ),
    PlantedBug(
        "prefix cache: attention that a view needs is not recorded",
        "model/session.py",
        find="int($text[0]) if $recorded_columns and len($text) else len($prompt)",
        plant="len($prompt)",
        tests=(
            "engine/test_prefix_cache.py::test_laws_and_what_is_written_down_are_a_whole_readings",
        ),
    ),
    PlantedBug(
        "renewed views: a row attends to one key fewer than it did",
        "model/session.py",
        within="Session.commit",
        find="$committed_rows + $depth + 1",
        plant="$committed_rows + $depth",
        tests=(
            "methods/test_renewed_views.py::test_it_tells_what_the_last_judged_rows_attended_to",
        ),
    ),
    PlantedBug(
        "renewed views: rejected rows count",
        "model/session.py",
        find="enumerate(path)",
        plant="enumerate(range(len(request.node_queries)))",
        tests=(
            "methods/test_renewed_views.py::test_it_tells_what_the_last_judged_rows_attended_to",
        ),
    ),
    PlantedBug(
        "renewed views: new tokens take the places of another layer's",
        "model/cache.py",
        find="($layer == $number).nonzero().squeeze(-1) if $count else $layer[:0]",
        plant="($layer != $number).nonzero().squeeze(-1)[:$count] if $count else $layer[:0]",
        tests=(
            "methods/test_renewed_views.py::test_an_exchanged_cache_holds_what_one_made_anew_would",
        ),
    ),
    PlantedBug(
        "pages: the least wanted pages are read",
        "model/cache.py",
        find="$logits.float().softmax(-1).sum(1).topk(self._pages_per_step)",
        plant="$logits.float().softmax(-1).sum(1).topk(self._pages_per_step, largest=False)",
        tests=("methods/test_pages.py::test_a_step_reads_the_pages_it_asks_for",),
    ),
    PlantedBug(
        "pages: all rows of a forward read the pages of the first row",
        "model/cache.py",
        find="self.copy_best_pages($cache, $layer, $row_q * $scale)",
        plant="self.copy_best_pages($cache, $layer, q[:, :1] * $scale)",
        tests=("methods/test_pages.py::test_a_law_is_of_its_path",),
    ),
    PlantedBug(
        "pages: a page is represented by its first key instead of its mean",
        "model/cache.py",
        find="$keys[:, $rows].mean(2).transpose",
        plant="$keys[:, $rows[:, 0]].transpose",
        tests=("methods/test_pages.py::test_a_step_reads_the_pages_it_asks_for",),
    ),
    PlantedBug(
        "the cache has the heads that the config names, whether or not the model reads it",
        "model/backbone.py",
        within="Backbone._build",
        find="self.head_shapes = self._find_head_shapes()",
        plant="""
            usual = HeadShape(self.kv_heads, self.head_dim, self.head_dim)
            self.head_shapes = [usual] * self.key_layer_count
        """,
        tests=(
            "model/test_logits_and_rotations.py::"
            "test_the_cache_has_the_heads_of_the_layers_and_not_those_of_the_config",
        ),
    ),
)
