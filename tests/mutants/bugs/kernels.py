"""Bugs in the kernels, in CUDA graphs and in the pool of caches."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "a model that stops at an early layer captures its steps in a memory pool of its own",
        "model/capture_choice.py",
        find="None if $backbone.full_backbone is None else graphs_of($backbone.full_backbone).pool",
        plant="None",
        tests=(
            "gpu/test_methods_on_gpu.py::test_a_method_is_right_and_within_its_budget[layerskip]",
        ),
    ),
    PlantedBug(
        "attention in C: a row of the prompt attends to the next one",
        "model/kernels/kernels.c",
        find="c->rows + number + 1;",
        plant="c->rows + number + 2;",
        tests=("model/test_compiled.py::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    PlantedBug(
        "attention in C: sums so far are not rescaled to the new maximum",
        "model/kernels/kernels.c",
        find="mixed[i * vectors + n] *= shrink[n];",
        plant="mixed[i * vectors + n] *= 1;",
        tests=("model/test_compiled.py::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    PlantedBug(
        "attention in C: a bias is not converted to base two",
        "model/kernels/kernels.c",
        find="key - before] * (float)LOG2_E;",
        plant="key - before];",
        tests=("model/test_compiled.py::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    PlantedBug(
        "attention in C: rows of a tile attend to too many keys",
        "model/kernels/kernels.c",
        find="if (own < visible.fewest) visible.fewest = own;",
        plant="if (own > visible.fewest) visible.fewest = own;",
        tests=("model/test_compiled.py::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    PlantedBug(
        "kernels in C: a compiler's setting lets some loops round twice",
        "model/kernels/compiled.py",
        find="'--param=avoid-fma-max-bits=0'",
        plant="'-DNOTHING'",
        tests=("model/test_compiled.py::test_other_processors_vectors_compute_the_same",),
    ),
    PlantedBug(
        "kernels: measurements of an older version of the kernels are used",
        "model/kernels/__init__.py",
        find="_MEASUREMENTS.key('least', compiled.version(), *$facts)",
        plant="_MEASUREMENTS.key('least', *$facts)",
        tests=("model/test_kernels.py::test_what_was_measured_is_remembered_for_these_threads",),
    ),
    PlantedBug(
        "products in C: a bias is read as one bias for each row",
        "model/kernels/compiled.py",
        within="multiply",
        find="$out if $base.dim() > 1 else 0",
        plant="$out",
        tests=("model/test_kernels.py::test_every_kernel_computes_the_same_product",),
    ),
    PlantedBug(
        "products in C: a thread leaves out the last rows of its part",
        "model/kernels/kernels.c",
        find="stop = blocks * (unit / panels + 1) / parts;",
        plant="stop = blocks * (unit / panels + 1) / parts - (parts > 1);",
        tests=("model/test_kernels.py::test_every_kernel_computes_the_same_product",),
    ),
    PlantedBug(
        "products in C: the gate and the gated half are exchanged",
        "model/kernels/compiled.py",
        within="Panels.of_gated",
        find="$weight.chunk(2)",
        plant="reversed($weight.chunk(2))",
        tests=("model/test_kernels.py::test_every_kernel_computes_the_same_product",),
    ),
    PlantedBug(
        "vision towers: attention is causal",
        "model/kernels/tower.py",
        find="compiled.attend($q, $k, $v, $all_see, $scale)",
        plant="compiled.attend($q, $k, $v, None, $scale)",
        tests=("model/test_tower.py::test_a_towers_attention_is_by_the_quicker_kernel",),
    ),
    PlantedBug(
        "attention in C: padding rows count in the recorded attention",
        "model/kernels/kernels.c",
        find="counts = r < t.count && row_of",
        plant="counts = row_of",
        tests=("model/test_compiled.py::test_what_rows_attend_to_is_double_precisions",),
    ),
    PlantedBug(
        "recorded attention in C: rows that were not asked for count too",
        "model/kernels/kernels.c",
        find="row_of(c, t, r) >= c->rows - c->mass_rows;",
        plant="1;",
        tests=("model/test_compiled.py::test_what_is_noted_on_the_way_is_what_is_attended_to",),
    ),
    PlantedBug(
        "attention in C: parts of the keys are joined without their own maximum",
        "model/kernels/kernels.c",
        find="first = power_of_two(merged[tops + n] - top), second",
        plant="first = power_of_two(top - top), second",
        tests=("model/test_compiled.py::test_it_is_the_softmax_over_what_each_row_sees",),
    ),
    PlantedBug(
        "kernels: the fingerprint of a weight reads one column only",
        "model/kernels/__init__.py",
        find="math.gcd($step, $into) > 1",
        plant="math.gcd($step, $into) > $into",
        tests=("model/test_kernels.py::test_a_weight_tells_of_a_change_to_any_part",),
    ),
    PlantedBug(
        "vision towers: copies of weights are not renewed after a change",
        "model/kernels/__init__.py",
        within="TunedMatrices.refresh",
        find="self._fingerprints == $fingerprints",
        plant="self._fingerprints",
        tests=(
            "model/test_tower.py::"
            "test_a_towers_weights_changed_in_place_count_from_the_next_prompt_on",
        ),
    ),
    PlantedBug(
        "CUDA graphs: a request attends to another request's cache",
        "model/cuda_graphs.py",
        within="GatheredAttention.attention",
        find="$first_rows[:, None] + $heads * $capacities[:, None]",
        plant="$first_rows.roll(1)[:, None] + $heads * $capacities[:, None]",
        tests=("model/test_cuda_graphs.py::test_several_requests_are_one_step",),
    ),
    PlantedBug(
        "CUDA graphs: only the first captured size is checked",
        "model/cuda_graphs.py",
        within="CudaGraphs._capture_one",
        find="$kind.agrees($captured, $ordinary, $first_layers_agree)",
        plant="self._captured or $kind.agrees($captured, $ordinary, $first_layers_agree)",
        tests=("model/test_cuda_graphs.py::test_each_size_is_compared_with_an_ordinary_forward",),
    ),
    PlantedBug(
        "likeliest tokens: the next step's are read instead",
        "model/cuda_graphs.py",
        within="CudaGraphs._fill",
        find="$tokens.preserve()",
        plant="None",
        tests=(
            "model/test_likeliest.py::test_a_step_that_follows_does_not_change_what_was_scored",
        ),
    ),
    PlantedBug(
        "likeliest tokens: each request has the vocabulary of the first",
        "model/likeliest.py",
        within="VocabularyTable.forbid_",
        find="$forbidden[:, None]",
        plant="$forbidden[:1, None]",
        tests=(
            "model/test_likeliest.py::"
            "test_sessions_that_share_a_forward_have_their_own_vocabularies",
        ),
    ),
    PlantedBug(
        "few-row kernels: captures are turned off where a kernel fails",
        "model/cuda_graphs.py",
        within="FewRowKernels.replacement",
        find="return GATHERED",
        plant="return None",
        tests=(
            "model/test_few_rows.py::test_kernels_that_fail_later_are_given_up_before_captures",
        ),
    ),
    PlantedBug(
        "CUDA graphs: the trial's keys stay in the cache",
        "model/cuda_graphs.py",
        within="restore_keys",
        find="""
            for $part, $old in zip($parts, $before, strict=True):
                $part.copy_($old)
        """,
        plant="pass",
        tests=("model/test_cuda_graphs.py::test_a_trial_changes_no_keys",),
    ),
    PlantedBug(
        "CUDA graphs: a graph is captured on another GPU's stream",
        "model/cuda_graphs.py",
        find=(
            "torch.cuda.graph($graph, pool=$pool, stream=$stream, "
            "capture_error_mode='thread_local')"
        ),
        plant="torch.cuda.graph($graph, pool=$pool, capture_error_mode='thread_local')",
        tests=("gpu/test_captures.py::test_the_second_gpu_is_captured_on_its_own_stream",),
    ),
    PlantedBug(
        "CUDA graphs: graphs are used after their memory pool has moved",
        "model/cache_pool.py",
        find="$watcher.drop_captured()",
        plant="None",
        tests=("model/test_cache_pool.py::test_a_pool_that_moves_takes_its_caches_along",),
    ),
    PlantedBug(
        "a pool that grows holds all old buffers until the last one has moved",
        "model/cache_pool.py",
        within="CachePool._resize",
        find="self._move_leases()",
        plant="None",
        tests=(
            "model/test_cache_pool.py::test_growing_frees_each_buffer_before_the_next_one_grows",
        ),
    ),
    PlantedBug(
        "a pool that cannot grow by much does not try less",
        "model/cache_pool.py",
        within="CachePool._grow",
        find="sorted({$rows, $generous}, reverse=True)",
        plant="[$generous]",
        tests=("model/test_cache_pool.py::test_memory_that_runs_out_while_the_pool_grows",),
    ),
    PlantedBug(
        "the cache pool lends the same row twice",
        "model/cache_pool.py",
        within="CachePool._take_rows",
        find="($start + $rows, $stop)",
        plant="($start + $rows - 1, $stop)",
        tests=("model/test_cache_pool.py::test_what_is_dropped_is_borrowed_again",),
    ),
    PlantedBug(
        "few-row kernels: the mask of a tree is ignored",
        "model/kernels/few_rows_triton.py",
        within="_add_keys",
        find="$allowed != 0",
        plant="$allowed >= 0",
        tests=("model/test_few_rows.py::test_requests_of_unlike_lengths_do_not_read_each_other",),
    ),
    PlantedBug(
        "few-row kernels: the first split's keys are dropped",
        "model/kernels/few_rows_triton.py",
        find="split * split_keys",
        plant="tl.maximum(split, 1) * split_keys",
        tests=("model/test_few_rows.py::test_keys_may_be_split_over_any_number_of_programs",),
    ),
    PlantedBug(
        "few-row kernels: keys are normed with the queries' weights",
        "model/kernels/few_rows_triton.py",
        find="$norm = key_norm",
        plant="$norm = query_norm",
        tests=("model/test_few_rows.py::test_rotation_norms_and_writing_are_torchs",),
    ),
    PlantedBug(
        "vision towers: windows attend to each other",
        "model/kernels/tower_windows.py",
        find=(
            "attend_by_flash($q, $k, $v, $borders.to(torch.int32), $longest, $scale, "
            "bool($is_causal))"
        ),
        plant=(
            "attend_by_flash($q, $k, $v, $borders[[0, -1]].int(), len($q), $scale, "
            "bool($is_causal))"
        ),
        tests=(
            "model/test_tower_windows.py::test_a_tower_with_windows_sees_in_one_call_a_layer_what_it_saw",
        ),
    ),
    PlantedBug(
        "weights are packed anew each time the number of threads changes back",
        "model/kernels/__init__.py",
        find="""
            if $choice not in self._tables:
                for $name in set($choice.names) - self._prepared.keys():
                    self._prepared[$name] = self.products[$name].prepare(self.weight)
                ...
        """,
        plant="""
            if True:
                for $name in set($choice.names):
                    self._prepared[$name] = self.products[$name].prepare(self.weight)
                ...
        """,
        tests=(
            "engine/test_predecessors.py::test_no_weights_are_laid_out_on_the_clock_of_any_method",
        ),
    ),
    PlantedBug(
        "recorded attention: the first rows of a forward are taken for its last",
        "model/kernels/attention_mass.py",
        within="RowQueries.add",
        find="$q[:, -self.last_row_count:]",
        plant="$q[:, :self.last_row_count or None]",
        tests=("model/test_decoder.py::test_a_prompts_last_layer_computes_what_is_wanted_alone",),
    ),
    PlantedBug(
        "recorded attention in C: weights are not rescaled to the new maximum",
        "model/kernels/kernels.c",
        find="power_of_two(shrink[block * vectors + n] - highest[n])",
        plant="power_of_two((lanes){0})",
        tests=("model/test_compiled.py::test_what_is_noted_on_the_way_is_what_is_attended_to",),
    ),
    PlantedBug(
        "kernels: the first measurement decides for ever",
        "model/kernels/__init__.py",
        within="shortest_times",
        find="min($seconds, $old[$name])",
        plant="$old[$name]",
        tests=(
            "model/test_kernels.py::test_a_busy_moment_does_not_decide_for_good_how_to_multiply",
        ),
    ),
    PlantedBug(
        "kernels: a packed copy is kept however little it saves",
        "model/kernels/__init__.py",
        within="best_choice",
        find="1 + MAX_SLOWDOWN_WITHOUT_COPY",
        plant="1",
        tests=("model/test_kernels.py::test_a_copy_that_saves_little_is_not_kept",),
    ),
    PlantedBug(
        "products of bf16 in C: the rows of the last outputs lie elsewhere",
        "model/kernels/kernels.c",
        find="const ptrdiff_t second = c->gated ? c->out + first : after;",
        plant="const ptrdiff_t second = c->gated ? c->out + start : after;",
        tests=("model/test_bf16_products.py::test_a_product_is_fp32s_rounded_once",),
        needs="amx_bf16",
    ),
    PlantedBug(
        "products of bf16 in C: vectors leave out the inputs that fill no vector",
        "model/kernels/kernels.c",
        find="add_products(rows, (1u << (inputs->to - i)) - 1, x + i, w + i, in, sum);",
        plant="add_products(rows, 0, x + i, w + i, in, sum);",
        tests=("model/test_bf16_products.py::test_a_product_is_fp32s_rounded_once",),
        needs="avx512_bf16",
    ),
    PlantedBug(
        "products of bf16 in C: a part of the inputs replaces the part before it",
        "model/kernels/kernels.c",
        find="if (inputs->from) results =",
        plant="if (0) results =",
        tests=("model/test_bf16_products.py::test_many_inputs_are_added_up_in_parts",),
        needs="avx512_bf16",
    ),
    PlantedBug(
        "products of few bits in C: halves of bytes are met by each other's inputs",
        "model/kernels/kernels.c",
        find="_mm512_set1_epi32(x[r * (c->in / 4) + 4])",
        plant="_mm512_set1_epi32(x[r * (c->in / 4)])",
        tests=("model/test_few_bits.py::test_a_product_is_that_of_the_rounded_weights",),
        needs="avx512_vnni",
    ),
    PlantedBug(
        "drafts of few bits: the target multiplies with rounded weights too",
        "model/decoder.py",
        within="FusedDecoder.rounded",
        find="rounded_decoder = copy(self)",
        plant="rounded_decoder = self",
        tests=(
            "model/test_few_bits.py::test_an_answer_is_the_targets_whatever_the_draft_is_rounded_to",
        ),
    ),
)
