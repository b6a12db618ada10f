"""Import Flower through dpftrl first, which silences the warnings of Flower's imports."""

import dpftrl.flower  # noqa: F401
