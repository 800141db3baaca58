"""What several test files share: models and prompts, processes, stand-ins for CUDA graphs. Test files import from here
alone.

`comparison`, `models` and `processes` are re-exported. `families` is the table of small random models, `ranks` the
processes of tests/test_parallel.py, `graphs` the stand-ins for CUDA graphs. `guard_pages` and `compile_kernels` are
programs. Fixtures that more than one file takes are in `fixtures`.
"""

from support.comparison import compare, in_threads, note_calls, run_both
from support.models import (
    TOKENIZER,
    VOCAB,
    Choose,
    CountingBias,
    Recorder,
    assert_same_state,
    generate_plain,
    inference_tensors,
    is_patched,
    padded_prompt,
    prompt,
    seeded,
    tiny,
    tiny_llama,
)
from support.processes import BUNDLED, ENVIRONMENT, ROOT, beside, forked, forked_twice, python
