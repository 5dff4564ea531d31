"""Trainers and libraries that people compile for: the real packages, small models.

Each is left out where its package isn't installed.
"""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import tripwire

pytestmark = pytest.mark.filterwarnings("ignore")  # the packages' own


def make_net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def make_loader():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(16, 4), torch.randn(16, 1))
    return torch.utils.data.DataLoader(data, batch_size=4)


def check_same_parameters(left: nn.Module, right: nn.Module) -> None:
    for name, value in left.named_parameters():
        assert torch.equal(value, right.get_parameter(name)), name


def test_lightning_fits_a_compiled_module() -> None:
    lightning = pytest.importorskip("lightning", reason="pip install lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            return self.net(x)

        def training_step(self, batch, index):
            x, y = batch
            loss = nn.functional.mse_loss(self(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(module):
        trainer = lightning.Trainer(
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            accelerator="cpu",
        )
        trainer.fit(module, make_loader())

    plain, original = Lit(), Lit()
    compiled = tripwire.compile(original, backend="eager")
    fit(plain)
    fit(compiled)
    check_same_parameters(plain, original)
    done = compiled.statistics()
    assert (done.traces, done.hits) == (1, 7)


def test_accelerate_compiles_with_tripwire_where_torch_compile_is_replaced() -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")
    accelerate.state.AcceleratorState._reset_state()  # all accelerators of a process share one
    model = make_net()
    twin = copy.deepcopy(model)
    with tripwire.replacing_torch_compile():
        accelerator = accelerate.Accelerator(cpu=True, dynamo_backend="eager")
        prepared = accelerator.prepare(model)
    for _ in range(4):
        torch.testing.assert_close(prepared(torch.ones(2, 4)), twin(torch.ones(2, 4)))
    assert (prepared.statistics().traces, prepared.statistics().hits) == (1, 3)
    with tripwire.replacing_torch_compile():  # what is compiled already is compiled for accelerate
        again = accelerator.prepare(prepared)
    assert again._orig_mod is prepared._orig_mod
    torch.testing.assert_close(again(torch.ones(2, 4)), twin(torch.ones(2, 4)))
    accelerate.state.AcceleratorState._reset_state()


def test_accelerate_prepares_saves_and_unwraps_a_compiled_module(tmp_path) -> None:
    accelerate = pytest.importorskip("accelerate", reason="pip install accelerate")

    def train(model):
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
        for x, y in loader:
            with accelerator.accumulate(prepared):
                accelerator.backward(nn.functional.mse_loss(prepared(x), y))
                accelerator.clip_grad_norm_(prepared.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return accelerator, prepared

    plain, original = make_net(), make_net()
    train(plain)
    compiled = tripwire.compile(original, backend="eager")
    accelerator, prepared = train(compiled)
    check_same_parameters(plain, original)
    assert compiled.statistics().hits == 3
    assert list(accelerator.get_state_dict(prepared)) == list(plain.state_dict())
    unwrapped = accelerator.unwrap_model(prepared)
    assert torch.equal(unwrapped(torch.ones(1, 4)), plain(torch.ones(1, 4)))
    accelerator.save_model(prepared, tmp_path / "model")
    accelerator.save_state(str(tmp_path / "state"))
    accelerator.load_state(str(tmp_path / "state"))
    assert torch.equal(prepared(torch.ones(1, 4)), plain(torch.ones(1, 4)))


def test_the_trainer_of_transformers_takes_ours_as_a_model_or_for_torch_compile(tmp_path) -> None:
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    small = transformers.BertConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        hidden_dropout_prob=0,
        attention_probs_dropout_prob=0,
    )
    mask = torch.ones(6, dtype=torch.long)
    data = [
        {"input_ids": torch.arange(6) + i, "attention_mask": mask, "labels": i % 2}
        for i in range(12)
    ]

    def train(wrap, **options):
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(small)
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=2,
            report_to=[],
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            **options,
        )
        trainer = transformers.Trainer(wrap(model), arguments, train_dataset=data)
        trainer.train()
        return model, trainer

    plain, _ = train(lambda model: model)
    original, trainer = train(lambda model: tripwire.compile(model, backend="eager"))
    check_same_parameters(plain, original)
    assert trainer.model.statistics().hits >= 4  # the first call may write to the config
    trainer.save_model(str(tmp_path / "saved"))
    again = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved")
    check_same_parameters(plain, again)
    with tripwire.replacing_torch_compile():
        original, trainer = train(
            lambda model: model, torch_compile=True, torch_compile_backend="eager"
        )
    check_same_parameters(plain, original)
    assert trainer.model_wrapped.statistics().hits >= 4


def make_adapted(peft, base, targets):
    lora = peft.LoraConfig(target_modules=targets, r=2, init_lora_weights=False)
    model = peft.get_peft_model(base, lora, adapter_name="one")
    model.add_adapter("two", lora)
    return model.eval()


def play_adapters(model, compiled, call) -> None:
    def check() -> None:
        with torch.no_grad():
            torch.testing.assert_close(call(compiled), call(model))

    for name in ["one"] * 3 + ["two"] * 3 + ["one", "two"] * 2:
        model.set_adapter(name)
        check()
    with model.disable_adapter():
        for _ in range(3):
            check()
    model.merge_adapter()
    for _ in range(3):
        check()


def test_peft_sets_adapters_between_calls() -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = make_adapted(peft, make_net(), ["0", "2"])
    compiled = tripwire.compile(model, backend="eager")
    x = torch.ones(2, 4)
    play_adapters(model, compiled, lambda callee: callee(x))
    assert compiled.statistics().traces <= 5  # two adapters, none, and merged


def test_peft_sets_adapters_of_a_model_of_transformers() -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    transformers = pytest.importorskip("transformers", reason="pip install transformers")
    torch.manual_seed(0)
    base = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    model = make_adapted(peft, base, ["q_proj", "v_proj"])
    ids = torch.randint(0, 64, (1, 6))
    compiled = tripwire.compile(model, backend="eager")
    play_adapters(model, compiled, lambda callee: callee(input_ids=ids).logits)
    assert compiled.statistics().traces <= 5  # two adapters, none, and merged


def test_torch_geometric_layers_over_graphs_of_several_sizes() -> None:
    geometric = pytest.importorskip("torch_geometric", reason="pip install torch_geometric")

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = geometric.nn.GCNConv(4, 8)
            self.second = geometric.nn.GATConv(8, 8)
            self.third = geometric.nn.SAGEConv(8, 2)

        def forward(self, x, edges):
            x = self.first(x, edges).relu()
            return self.third(self.second(x, edges).relu(), edges)

    torch.manual_seed(0)
    net = Net()
    compiled = tripwire.compile(copy.deepcopy(net), backend="eager")
    for nodes, edges in ((5, 8), (5, 8), (6, 9), (7, 11), (9, 13)) * 2:
        torch.manual_seed(nodes)  # a graph of a size is one graph: loops in it decide
        x, pairs = torch.randn(nodes, 4), torch.randint(0, nodes, (2, edges))
        torch.testing.assert_close(compiled(x, pairs), net(x, pairs))
    assert compiled.statistics().hits >= 5
