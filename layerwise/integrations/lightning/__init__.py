"""Lightning: `Trainer(strategy="layerwise")`, once this is imported."""

from lightning.pytorch.strategies import StrategyRegistry

from layerwise.integrations.lightning.strategy import LayerwiseStrategy as LayerwiseStrategy

LayerwiseStrategy.register_strategies(StrategyRegistry)
