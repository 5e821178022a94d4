"""A plan as one page of HTML that needs nothing else.

In: a plan. Out: text: style, tables and charts as inline SVG, light and dark, for wide and narrow windows. Nothing is loaded from
anywhere and nothing runs. What can go wrong: jinja2 and matplotlib are not installed; the error names the extra that brings them.
"""
