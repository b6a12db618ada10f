import numpy as np

SIZE = 6


def start() -> np.ndarray:
    return np.zeros(SIZE, np.float32)


def target(partition: int) -> np.ndarray:
    """Return the model that fits a node's data best."""
    return np.cos(np.arange(SIZE)) + 0.05 * np.sin(partition + np.arange(SIZE))


def train(model: np.ndarray, partition: int) -> np.ndarray:
    return (model + 0.5 * (target(partition) - model)).astype(np.float32)


def loss(model: np.ndarray) -> float:
    return float(np.linalg.norm(model - np.cos(np.arange(SIZE))))
