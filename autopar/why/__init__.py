"""Why a plan is as it is: questions that are answered by planning again under one more constraint.

In: a plan, with the step and the settings that it was made for. Out: what another layout of a leaf would cost, and which of
the user's wishes leave no plan within the memory, with the price of giving each of them up. Nothing is estimated: each answer
is a plan that was found. What can go wrong: a plan that was read from a file, which knows no step; the error says how to get
one that does.
"""
