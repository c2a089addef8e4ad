"""Bugs in heads, and in the hidden states that they read."""

from bugs.bug import PlantedBug

HEADS = "model/test_heads.py"
HISTORY = f"{HEADS}::test_any_history_of_a_head_equals_the_reference"

BUGS = (
    PlantedBug(
        "the hidden states of a rejected row stay in the place of an accepted one's",
        "model/cache.py",
        within="Cache.commit_path",
        find="self.hidden.move($rows, $start)",
        plant="None",
        tests=(HISTORY,),
    ),
    PlantedBug(
        "a head's drafted rows are one position too far",
        "model/heads/head_session.py",
        find="$request.positions($request.row_count - 1 + $depths)",
        plant="$request.positions($request.row_count + $depths)",
        tests=(HISTORY,),
    ),
    PlantedBug(
        "a head reads the hidden state of the place after its row",
        "model/heads/head_session.py",
        within="HeadSession._add_text",
        find="slice($first, $first + $waiting)",
        plant="slice($first + 1, $first + $waiting + 1)",
        tests=(HISTORY,),
    ),
    PlantedBug(
        "a pruned row reads the embedding of the next row that was kept",
        "model/heads/head.py",
        find="$prompt.embeds[$rows + 1]",
        plant="torch.cat([$prompt.embeds[$rows[1:]], $prompt.embeds[$rows[-1:] + 1]])",
        tests=(f"{HEADS}::test_a_pruned_prompt_keeps_the_targets_positions",),
    ),
    PlantedBug(
        "a node reads the output of the text's last row and not of its parent's",
        "model/heads/head_session.py",
        find="torch.stack([$outputs[$parent] for $parent in $parents])",
        plant="torch.stack([$outputs[ROOT] for $parent in $parents])",
        tests=(HISTORY,),
    ),
    PlantedBug(
        "a head's ids are taken for the target's",
        "model/heads/modules.py",
        find="torch.arange(len($ids), device=$ids.device) + $ids",
        plant="torch.arange(len(d2t), device=d2t.device)",
        tests=(f"{HEADS}::test_a_drawn_token_carries_the_law_of_the_heads_own_vocabulary",),
    ),
    PlantedBug(
        "a later step of training sees the keys of a first step that drafting lacks",
        "world/train_draft/eagle3.py",
        within="unrolled_mask",
        find="$back >= $step",
        plant="$back >= 0",
        tests=("world/test_train_eagle3.py::test_an_unrolled_row_is_a_drafted_row",),
    ),
    PlantedBug(
        "a part of the unrolled rows sees keys of the rows that were left out",
        "world/train_draft/eagle3.py",
        within="unrolled_mask",
        find="$back[:, $first:]",
        plant="$back[:, : $back.shape[1] - $first]",
        tests=("world/test_train_eagle3.py::test_a_training_step_leaves_out_what_no_answer_reads",),
    ),
    PlantedBug(
        "a block of a DFlash head stands one place too early",
        "model/heads/block_session.py",
        find="$each.positions($each.row_count + $block)",
        plant="$each.positions($each.row_count - 1 + $block)",
        tests=("model/test_dflash.py::test_blocks_are_those_of_transformers_own_class",),
    ),
    PlantedBug(
        "rows of a DFlash head's block see no later row",
        "model/heads/dflash.py",
        find="torch.full(($rows,), $at + $rows - 1)",
        plant="torch.arange(at, at + rows)",
        tests=("model/test_dflash.py::test_blocks_are_those_of_transformers_own_class",),
    ),
    PlantedBug(
        "a DFlash head reads the hidden states of the layer before",
        "model/heads/dflash.py",
        find="int(layer) + 1",
        plant="int(layer)",
        tests=("model/test_dflash.py::test_blocks_are_those_of_transformers_own_class",),
    ),
)
