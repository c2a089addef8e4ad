"""Bugs in the named methods."""

from bugs.bug import PlantedBug

BUGS = (
    PlantedBug(
        "tabed: the ensemble's weights are not the grid's",
        "methods/tabed.py",
        find="grid($state.view_count)[$best]",
        plant="(1.0, *grid($state.view_count)[$best][1:])",
        tests=("methods/test_tabed.py::test_every_round_is_algorithm_1",),
    ),
    PlantedBug(
        "a second file may take over a method's name",
        "methods/registry.py",
        within="_collect",
        find="$name in $table",
        plant="False",
        tests=("methods/test_sixth_method.py::test_two_files_may_not_bring_one_name",),
    ),
    PlantedBug(
        "eagle-2: a node's value is its own probability",
        "methods/eagle2.py",
        find="$above + min(0.0, math.log($p))",
        plant="min(0.0, math.log($p))",
        tests=("methods/test_eagle2.py::test_it_expands_and_reranks_as_the_paper_says",),
    ),
    PlantedBug(
        "sage: entropy mixes bits and nats",
        "methods/sage.py",
        within="confidence",
        find="$entropy / math.log($k)",
        plant="$entropy / math.log2($k)",
        tests=("methods/test_sage.py::test_one_law_plans_the_next_tree_ties_included",),
    ),
    PlantedBug(
        "sage: a confident draft gets a wide tree",
        "methods/sage.py",
        within="Reach.children",
        find="1 - self.alpha",
        plant="self.alpha",
        tests=("methods/test_sage.py::test_any_laws_give_the_papers_tree",),
    ),
    PlantedBug(
        "sage: the threshold does not grow with the level",
        "methods/sage.py",
        find="self.shape.theta * $level",
        plant="self.shape.theta",
        tests=("methods/test_sage.py::test_any_laws_give_the_papers_tree",),
    ),
    PlantedBug(
        "sage: the prose's rule is ignored",
        "methods/sage.py",
        find="self.shape.rule == 'prose'",
        plant="False",
        tests=("methods/test_sage.py::test_any_laws_give_the_papers_tree",),
    ),
    PlantedBug(
        "sage: the window forgets nothing",
        "methods/sage.py",
        find="(*$state.recent, len($round.verdict.accepted))[-self.window:]",
        plant="(*$state.recent, len($round.verdict.accepted))",
        tests=("methods/test_sage.py::test_the_history_moves_the_deepest_depth_by_the_rule",),
    ),
    PlantedBug(
        "hippo: the spatial score is left out",
        "methods/hippo.py",
        find="""
            if self.spa:
                ...
        """,
        plant="pass",
        tests=("methods/test_hippo_scores.py::test_the_holistic_score_is_eq_7",),
    ),
    PlantedBug(
        "hippo: attention is not z-scored within its frame",
        "methods/hippo.py",
        find="saliency.per_frame($target_attention.to($total.device), $prompt.grid)",
        plant="$target_attention.to($total.device)",
        tests=("methods/test_hippo_scores.py::test_the_holistic_score_is_eq_7",),
    ),
    PlantedBug(
        "overrides: a share that is set does not apply to images",
        "methods/names.py",
        find='{"images": None} if "images" in $owner.settings else {}',
        plant="{}",
        tests=("methods/test_sage.py::test_a_fifth_of_an_image_and_a_tenth_of_a_video",),
    ),
)
