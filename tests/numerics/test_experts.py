"""Experts: a token goes where dense training sends it, whatever node holds it; adapters beside them."""

import dense
import model_zoo
import pytest
import torch
import trees
from runs import replay_gradients, replay_of

from tiercache.runtime.rows import check_rows
from tiercache.runtime.visits import VisitRunner


def _noted_choices(model):
    """A list that grows by the experts [n, k] of each layer's tokens, in the order of their calls."""
    chosen = []

    def note(_, args):
        chosen.append(next(a for a in args if a.dtype == torch.int64).sort(-1).values)

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.register_forward_pre_hook(note)
    return chosen


@pytest.mark.parametrize("name", ["mixtral", "deepseek_v3", "glm_moe_dsa", "qwen3_next", "kimi_linear"])
def test_every_token_goes_to_the_experts_of_its_row(name, monkeypatch):
    model, case = model_zoo.build(name), trees.make_case("depth_3")
    chosen, of_node, hidden = _noted_choices(model), {}, VisitRunner._hidden

    def noted(self, step, frame):
        chosen.clear()
        result = hidden(self, step, frame)
        for piece in frame.pieces:
            of_node[piece.node] = [layer[piece.begin : piece.end] for layer in chosen]
        return result

    with replay_of(model, case) as replay:
        tree = replay.engine.make_tree(check_rows(case.rows, model_zoo.VOCAB))
        monkeypatch.setattr(VisitRunner, "_hidden", noted)
        replay.backward(case.rows, dense.weighted_sum)
    assert set(of_node) == set(range(len(tree.nodes)))
    for row, leaf in zip(case.rows, tree.leaf_of_row, strict=True):
        chosen.clear()
        with torch.no_grad():
            model(input_ids=row.tokens[None], use_cache=False)
        path = [of_node[node] for node in tree.path(leaf)]
        assert chosen
        for layer, want in enumerate(chosen):
            assert torch.equal(torch.cat([node[layer] for node in path]), want)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks a new model so
@pytest.mark.parametrize("name", ["mixtral", "deepseek_v32"])
def test_lora_beside_experts_and_on_an_indexer(name):
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj"] if name == "mixtral" else ["kv_b_proj", "q_b_proj", "wq_b"]
    experts = ["mlp.experts.down_proj"]
    model = get_peft_model(
        model_zoo.build(name), LoraConfig(r=4, target_modules=targets, target_parameters=experts)
    )
    model_zoo.randomise(model, 1)
    case = trees.make_case("chain_of_2")
    want = dense.weighted_gradients(model, case.rows)
    assert any("experts" in n for n in want)
    assert not any("indexer" in n for n in want)
    assert dense.relative_l2(replay_gradients(model, case), want) < 1e-5
