"""Pipeline stages of a model that is a chain of blocks.

Start with `split.py`.

- `external_reads.py`: Detection of values inside the model that code outside of it reads; a last stage may not have
  these values.
- `placeholders.py`: Placeholders for modules that a stage does not hold: they return NaN, which reveals any use of
  their values.
- `requirements.py`: The values of other stages that a stage needs, derived from the traced forward.
- `split.py`: The split of a model into stages, derived from one traced forward: what each stage holds, receives and
  sends.
- `stages.py`: Pipeline stages that run the model's own forward: no traced graph, no wrapper, the same names in
  `state_dict()`.
- `suggestions.py`: Suggestions for a model that can't be split as requested: other bounds or blocks that work.
- `trace_module_calls.py`: A trace of one forward: the dependencies of each value, and the block that made it.
"""
