"""Write the text of a plan: recommendations, explanations, differences between plans.

Start with `recommendations.py`.

- `explanations.py`: Explain each layout of a plan in one line, and build the error for the case that no layout fits.
- `layout_diff.py`: Describe how two estimates differ: in options, step time and peak memory.
- `memory_case.py`: Find the memory case of a model: everything fits on one device, only single layers fit, or a layer
  does not fit.
- `named_layouts.py`: Evaluate the layouts that a user names, and describe the differences between them.
- `numeric_options.py`: Find options that change the numerics of training, and forecast the gain of each.
- `plan_file_diff.py`: Describe how two plan.json files differ: in their inputs, and in the layouts that they recommend.
- `recommendations.py`: Build the advice of a plan: the memory case, the best layout of each family, the recommended
  one, and why.
"""
