"""Charts as SVG text.

Start with `charts.py`.

- `bar_chart.py`: Stacked horizontal bars as SVG text.
- `charts.py`: Small charts as SVG text, without a library.
- `downsampling.py`: Downsampling for charts: every drawn value is a logged value or a mean of logged values.
- `style.py`: The CSS of the pages, with light and dark colours.
"""
