"""What a plan says for itself.

In: a plan. Out: its methods `show`, `html` and what `print` prints. A plan is data and stands below the modules that describe it,
so these are loaded when somebody asks. What can go wrong: an optional package that the HTML report needs; the error names it.
"""
