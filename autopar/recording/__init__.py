"""What steps took when they ran, beside what their plan says.

In: what `autopar.measuring` has measured of calls. Out: a `RecordedRun`, which is compared with the plan, kept in a file that
trace viewers open, and tells who is slow. What can go wrong: measuring slows what it measures; the calls that were looked into
are told from those that were only timed.
"""
