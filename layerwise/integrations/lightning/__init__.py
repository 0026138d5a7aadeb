"""Lightning: `Trainer(strategy="layerwise")`, once this is imported."""

from lightning.pytorch.strategies import StrategyRegistry

from layerwise.integrations.lightning.strategy import LayerwiseStrategy as LayerwiseStrategy

StrategyRegistry.register("layerwise", LayerwiseStrategy, description="layers are split as is predicted to be fastest")
