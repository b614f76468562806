"""One self-contained HTML page of a run, of two runs side by side, or of a study."""

from .build import MOST_BYTES, page_html
from .data import page_data, run_data, study_data, with_fidelity
from .steps import STEPS, step_data, stored_data, write_steps

__all__ = [
    "MOST_BYTES",
    "STEPS",
    "page_data",
    "page_html",
    "run_data",
    "step_data",
    "stored_data",
    "study_data",
    "with_fidelity",
    "write_steps",
]
