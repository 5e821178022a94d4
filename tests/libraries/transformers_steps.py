"""Steps of the Flax models of transformers, at tiny sizes with random weights, and of Keras 3 with its JAX backend."""

import os

import jax
import jax.numpy as jnp

from tests.libraries.corpus import (
    BATCH,
    cross_entropy,
    integers,
    labelled,
    library_step,
    mixes_examples,
    noise,
    trained,
)

os.environ["KERAS_BACKEND"] = "jax"
SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 64}
SMALL |= {"max_position_embeddings": 16}
TEXT = {"input_ids": integers(60, BATCH, 8), "y": integers(60, BATCH, 8, seed=1)}


def of_transformers(model, batch, loss_of):
    """A step of a model of transformers: `loss_of(outputs, batch)`, with dropout off."""
    inputs = [name for name in batch if name != "y"]

    def whole(params, batch):
        outputs = model(**{name: batch[name] for name in inputs}, params=params, train=False)
        return loss_of(outputs, batch)

    return trained(whole, model.params, batch)


def classified(outputs, batch):
    return cross_entropy(outputs.logits, batch["y"])


@library_step("transformers")
def transformers_bert_fills_in_words():
    from transformers import BertConfig, FlaxBertForMaskedLM

    return of_transformers(FlaxBertForMaskedLM(BertConfig(**SMALL), input_shape=(1, 8)), TEXT, classified)


@library_step("transformers")
def transformers_roberta_classifies_sentences():
    from transformers import FlaxRobertaForSequenceClassification, RobertaConfig

    model = FlaxRobertaForSequenceClassification(RobertaConfig(**SMALL, num_labels=3), input_shape=(1, 8))
    return of_transformers(model, TEXT | {"y": integers(3, BATCH)}, classified)


@library_step("transformers")
def transformers_gpt2():
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
    return of_transformers(FlaxGPT2LMHeadModel(config, input_shape=(1, 8)), TEXT, classified)


@library_step("transformers")
def transformers_llama():
    from transformers import FlaxLlamaForCausalLM, LlamaConfig

    return of_transformers(FlaxLlamaForCausalLM(LlamaConfig(**SMALL), input_shape=(1, 8)), TEXT, classified)


@library_step("transformers")
def transformers_mistral():
    from transformers import FlaxMistralForCausalLM, MistralConfig

    config = MistralConfig(**SMALL, num_key_value_heads=1, sliding_window=4)
    return of_transformers(FlaxMistralForCausalLM(config, input_shape=(1, 8)), TEXT, classified)


@library_step("transformers")
def transformers_bart():
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 64}
    config = BartConfig(**sizes, max_position_embeddings=16, decoder_start_token_id=2)
    batch = TEXT | {"decoder_input_ids": integers(60, BATCH, 8, seed=2)}
    return of_transformers(FlaxBartForConditionalGeneration(config, input_shape=(1, 8)), batch, classified)


@library_step("transformers")
def transformers_vision_transformer():
    from transformers import FlaxViTForImageClassification, ViTConfig

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    model = FlaxViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=4))
    return of_transformers(model, {"pixel_values": noise(BATCH, 1, 8, 8), "y": integers(4, BATCH)}, classified)


@library_step(
    "transformers",
    refused=mixes_examples("relates examples of the batch to each other"),
)
def transformers_clip_contrasts_text_and_images():
    """The loss compares each example with all others."""
    from transformers import CLIPConfig, FlaxCLIPModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = sizes | {"vocab_size": 64, "max_position_embeddings": 16, "projection_dim": 8}
    vision = sizes | {"image_size": 8, "patch_size": 4, "num_channels": 3, "projection_dim": 8}
    model = FlaxCLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))
    places = jnp.broadcast_to(jnp.arange(8), (BATCH, 8))
    batch = {"input_ids": integers(60, BATCH, 8), "pixel_values": noise(BATCH, 3, 8, 8), "position_ids": places}
    batch |= {"attention_mask": jnp.ones((BATCH, 8), jnp.int32)}

    def loss_of(outputs, batch):
        return cross_entropy(outputs.logits_per_text, jnp.arange(BATCH))

    return of_transformers(model, batch, loss_of)


@library_step("transformers")
def transformers_whisper_transcribes():
    from transformers import FlaxWhisperForConditionalGeneration, WhisperConfig

    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    sizes |= {"d_model": 16, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_mel_bins": 8, "vocab_size": 64}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = WhisperConfig(**sizes, **marks, max_source_positions=8, max_target_positions=8)
    model = FlaxWhisperForConditionalGeneration(config, input_shape=(1, 8, 16))
    batch = {"input_features": noise(BATCH, 8, 16), "decoder_input_ids": integers(60, BATCH, 8)}
    return of_transformers(model, batch | {"y": integers(60, BATCH, 8, seed=1)}, classified)


def of_keras(layers, batch, rate=0.1):
    """A step of a Keras model by its stateless call, with a Keras optimizer, as its guide to custom training loops in JAX."""
    import keras

    keras.utils.set_random_seed(0)
    model, optimizer = layers(keras), keras.optimizers.SGD(rate, momentum=0.9)
    loss_of_logits = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model(batch["x"])
    optimizer.build(model.trainable_variables)

    def loss_of(trainable, rest, batch):
        logits, rest = model.stateless_call(trainable, rest, batch["x"], training=True)
        return loss_of_logits(batch["y"], logits), rest

    def step(state, batch):
        trainable, rest, kept = state
        (loss, rest), gradients = jax.value_and_grad(loss_of, has_aux=True)(trainable, rest, batch)
        trainable, kept = optimizer.stateless_apply(kept, gradients, trainable)
        return (trainable, rest, kept), loss

    variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    return step, tuple([variable.value for variable in group] for group in variables), batch


@library_step("keras")
def keras_perceptron_with_dropout():
    def layers(keras):
        dense = [keras.layers.Dense(16, "relu"), keras.layers.LayerNormalization(), keras.layers.Dropout(0.1)]
        return keras.Sequential([keras.layers.Input((8,)), *dense, keras.layers.Dense(4)])

    return of_keras(layers, labelled(8))


@library_step("keras")
def keras_attention():
    def layers(keras):
        tokens = keras.layers.Input((8,), dtype="int32")
        x = keras.layers.Embedding(32, 16)(tokens)
        x = keras.layers.Add()([x, keras.layers.MultiHeadAttention(2, 8)(x, x)])
        x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization()(x))
        return keras.Model(tokens, keras.layers.Dense(4)(x))

    return of_keras(layers, {"x": integers(32, BATCH, 8), "y": integers(4, BATCH)})


@library_step("keras")
def keras_convolutions_and_a_recurrent_layer():
    def layers(keras):
        x = image = keras.layers.Input((8, 8, 1))
        x = keras.layers.SeparableConv2D(8, 3, padding="same", activation="relu")(x)
        x = keras.layers.MaxPooling2D()(x)
        x = keras.layers.LSTM(8)(keras.layers.Reshape((4, 32))(x))
        return keras.Model(image, keras.layers.Dense(4)(x))

    return of_keras(layers, labelled(8, 8, 1))
