from diptych.router.observe.explain import RequestTrace


def test_an_explanation_shows_the_longest_gap_and_the_whole_time():
    """A stream that stalls after its first token had a good time to first token and nothing else."""
    trace = RequestTrace("r", ttft_s=0.5)
    for now in (10.5, 10.6, 13.6, 13.7):
        trace.on_tokens(now)
    trace.total_s = 3.7
    told = trace.explanation()
    assert (round(told.longest_gap_s, 3), told.total_s, told.ttft_s) == (3.0, 3.7, 0.5)
