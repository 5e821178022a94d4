"""The reports of a plan in every form: a line, a page, the terminal's report, HTML.

In: a plan. Out: what `autopar.explain` makes of it, with what only modules above that know: the picture of a pipeline's schedule,
and its timeline. What can go wrong: a schedule too wide to draw; it is left out.
"""
