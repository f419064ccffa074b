"""How the sequence of a constrained request ends: the end token comes only where it may."""

from loraplex.core.grammar import Grammar, GrammarKind
from loraplex.core.output import FinishReason
from loraplex.core.sampling_params import SamplingParams
from loraplex.scheduling.request import Stop, StopRules
from support.engine_requests import engine_request

EOS, STOP = 2, 9
PROMPT = (1, 1, 1)


def rules(*, constrained: bool = True, **sampling) -> StopRules:
    grammar = Grammar(GrammarKind.LLGUIDANCE, "{}") if constrained else None
    request = engine_request(
        PROMPT,
        SamplingParams(grammar=grammar, stop_token_ids=(STOP,), **sampling),
        eos_token_ids=(EOS,),
    )
    return StopRules(request, max_model_len=100)


def end_of(stop_rules: StopRules, *outputs: int) -> Stop | None:
    return stop_rules.after((*PROMPT, *outputs), len(PROMPT))


def test_an_end_token_ends_it_whatever_the_parameters():
    """Before min_tokens, and with ignore_eos, the masks let it through only where nothing else
    may follow."""
    for requested in ({"min_tokens": 5}, {"ignore_eos": True}):
        assert end_of(rules(**requested), 7, EOS) == Stop(FinishReason.STOP, EOS)
        assert end_of(rules(constrained=False, **requested), 7, EOS) is None


def test_stop_tokens_are_held_back_and_end_tokens_are_left_to_the_masks():
    assert rules(min_tokens=5).suppressed_token_ids == (STOP,)
    assert rules(constrained=False, min_tokens=5).suppressed_token_ids == (EOS, STOP)


def test_a_stop_token_may_end_it_before_its_grammar_does():
    assert end_of(rules(), 7, STOP) == Stop(FinishReason.STOP, STOP)
    assert end_of(rules(min_tokens=5), 7, STOP) is None


def test_a_runner_gets_the_end_tokens_of_constrained_rows_only():
    assert rules().grammar_end_ids == (EOS,)
    assert rules(constrained=False).grammar_end_ids == ()
