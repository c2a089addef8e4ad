"""Bugs in reading checkpoints in few bits, and in what they and rounded copies take of memory."""

from bugs.bug import PlantedBug

PACKED = "inputs/packed_checkpoints.py"
TESTS = "inputs/test_packed_checkpoints.py"
MATRIX = f"{TESTS}::test_a_packed_matrix_is_unpacked_to_what_it_stands_for"

BUGS = (
    PlantedBug(
        "packed weights: AWQ's columns are put in the order in which they were taken",
        PACKED,
        within="_unpack_awq",
        find="torch.tensor(AWQ_COLUMNS).argsort()",
        plant="torch.tensor(AWQ_COLUMNS)",
        tests=(MATRIX,),
    ),
    PlantedBug(
        "packed weights: the zero points of GPTQ's first format are one too small",
        PACKED,
        within="_unpack_gptq",
        find="(zeros + 1) & $mask",
        plant="zeros & $mask",
        tests=(MATRIX,),
    ),
    PlantedBug(
        "packed weights: the last block of FP8 takes the size of an even share",
        PACKED,
        within="_spread",
        find="size // count if block is None else int(block[axis])",
        plant="-(-size // count)",
        tests=(MATRIX,),
    ),
    PlantedBug(
        "packed weights: a target is unpacked although transformers reads it",
        PACKED,
        within="packing_to_unpack",
        find="packing is None or (packing.is_read_by_transformers and not is_draft)",
        plant="packing is None",
        tests=(f"{TESTS}::test_a_target_is_unpacked_where_transformers_cannot_read_it",),
    ),
    PlantedBug(
        "packed weights: a draft that is unpacked is counted in its own bits",
        "inputs/loading.py",
        within="load",
        find="config = packed_checkpoints.plain_config(config)",
        plant="pass",
        tests=(f"{TESTS}::test_a_packed_draft_counts_what_it_takes_once_unpacked",),
    ),
    PlantedBug(
        "memory: the rounded copy of a draft is left out before loading",
        "inputs/footprint.py",
        within="copied_bytes",
        find="model.rounded_copy_bytes(rounding.bytes_per_weight)",
        plant="0",
        tests=(f"{TESTS}::test_a_rounded_copy_is_counted_before_anything_is_loaded",),
    ),
    PlantedBug(
        "drafts in FP8: rows share one scale",
        "model/kernels/few_bits.py",
        within="_in_fp8",
        find="rows.abs().amax(-1, keepdim=True).float()",
        plant="rows.abs().amax().float().repeat(len(rows), 1)",
        tests=("model/test_few_bits.py::test_an_fp8_product_is_that_of_the_rounded_weights",),
    ),
    PlantedBug(
        "drafts in FP8: a GPU multiplies with the weights as they are",
        "model/decoder.py",
        within="FusedDecoder.rounded",
        find="choose_rounded(matrices)",
        plant="None",
        tests=("gpu/test_fp8_drafts.py::test_an_answer_with_an_fp8_draft_on_a_gpu_is_the_targets",),
    ),
)
