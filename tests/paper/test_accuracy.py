"""The claims about the accuracy of mechanisms."""

from dpftrl.paper.accuracy import PRINTED, accuracy_claims


def test_printed_accuracies_reproduce_the_claims_and_others_do_not():
    for epsilon in (2.0, 8.0):
        as_printed = {name: _seeds(values[epsilon]) for name, values in PRINTED.items()}
        assert {claim.verdict for claim in accuracy_claims(epsilon, as_printed)} == {"reproduces"}
        turned = {**as_printed, "TreeAgg-Full": _seeds(26.0), "BandMF": _seeds(27.0)}
        verdicts = [claim.verdict for claim in accuracy_claims(epsilon, turned)]
        assert verdicts.count("does not") == 2
        # What does not stand out of the noise is no finding.
        loud = {name: _seeds(values[epsilon], 5.0) for name, values in PRINTED.items()}
        assert [claim.verdict for claim in accuracy_claims(epsilon, loud)].count("does not") == 3


def _seeds(mean, spread=0.06):
    return [mean - spread, mean, mean + spread]
