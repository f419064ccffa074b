"""How a model classifies texts, as its folder states: front ends and the library apply it."""

import msgspec

from loraplex.core.errors import UnsupportedFeatureError
from loraplex.core.task import Pool, PoolActivation, PoolKind


class ClassFormat(msgspec.Struct, frozen=True, kw_only=True):
    """Labels of one model. The default is that of a model without a classification head."""

    num_labels: int = 0
    """Labels of the model's own head; 0: only adapters have heads."""
    labels: tuple[str, ...] = ()
    """Names of labels, for heads with as many of them; other heads have LABEL_0, LABEL_1, ..."""
    activation: PoolActivation = PoolActivation.SOFTMAX
    """What makes probabilities of scores, for the heads of adapters too."""
    pad_token_id: int | None = None
    """Token that is not classified: the last other one is. None: the last token is."""
    problem: str = ""
    """Why probabilities would not be what the folder states; empty: they are."""

    def pool(self, *, activation: bool | None = None) -> Pool:
        """Return the task of classifying a text. activation: False is the scores themselves.

        Raises UnsupportedFeatureError if the function of the folder is not computed here.
        """
        if activation is False:
            return Pool(PoolKind.SCORE, normalize=False)
        if self.problem:
            raise UnsupportedFeatureError(
                f"probabilities of this model are not served: {self.problem}; its scores are, with "
                "use_activation false",
                param="use_activation",
            )
        return Pool(PoolKind.SCORE, activation=self.activation, normalize=False)

    def labels_of(self, num_labels: int) -> tuple[str, ...]:
        """Return the names of the labels of a head that has so many."""
        if len(self.labels) == num_labels:
            return self.labels
        return tuple(f"LABEL_{index}" for index in range(num_labels))
