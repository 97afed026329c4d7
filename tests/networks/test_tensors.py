"""Groups of tensors by mask."""

import models
from elastic_trainer.networks.tensors import normalisation_and_bias_mask, tensor_names


def test_normalisation_and_bias_mask_contains_gamma_beta_bias_and_the_head():
    model = models.build_model("mobilenetv2", 32, 5, alpha=0.35)
    mask = normalisation_and_bias_mask(model)
    for name, trains in zip(tensor_names(model), mask, strict=True):
        assert trains == (name.endswith(("/gamma", "/beta", "/bias")) or name.startswith("head/"))
