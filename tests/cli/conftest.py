from tests.training.conftest import figures, here, no_figures, restored_registries

__all__ = ["figures", "here", "no_figures", "restored_registries"]
