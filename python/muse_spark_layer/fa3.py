"""The layer with FlashAttention-3 as its attention engine: for the judge, and for comparison.

    judge.py --module python/muse_spark_layer/fa3.py --check --strict 0.015

Needs a library built with the feature `fa3`. The schedule is prepared by each call, as for a single layer;
Layer.scheduler_metadata shares it between layers. (SGLang's own metadata has another layout and is not read.)
"""

from . import layer


class Layer(layer.Layer):
    def __init__(self, weights, **options):
        super().__init__(weights, **{"engine": "fa3", "query": "e4m3", **options})
