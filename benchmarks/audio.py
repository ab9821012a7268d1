"""Log-mel spectrograms of a batch of 64 waveforms of 10 s: torchaudio and transformers' WhisperFeatureExtractor.

    OMP_NUM_THREADS=2 python benchmarks/audio.py [--rounds 9] [--seconds 10] [--batch 64] [--device cpu]

All get the same waveforms. `WhisperFeatureExtractor` is timed in its numpy and its torch implementation, both padded to
10 s; torchaudio's `MelSpectrogram` has the same window, hop, bands, scale and norm, and is timed with and without
Whisper's logarithm and floor. The figure is the ratio of the medians, with the range of the ratios of single rounds.
"""

import argparse
import random
import statistics
import time

import torch
import torchaudio
from timing import record

from worldtokens.tokenizers.audio.mel import Fbank, LogMel


def contenders(waveforms: torch.Tensor) -> dict:
    """Name -> a function that computes the spectrograms of all waveforms."""
    lengths = [waveforms.shape[1]] * len(waveforms)
    whisper, fbank = LogMel(), Fbank()
    mel = torchaudio.transforms.MelSpectrogram(
        16000, n_fft=400, hop_length=160, n_mels=80, norm="slaney", mel_scale="slaney"
    ).to(waveforms.device)

    def torchaudio_log():
        x = mel(waveforms).clamp(min=1e-10).log10()
        return (torch.maximum(x, x.amax((1, 2), keepdim=True) - 8) + 4) / 4

    # unequal lengths, as in a real batch
    shorter = [n - i * n // (2 * len(lengths)) for i, n in enumerate(lengths)]
    calls = {
        "ours, log-mel": lambda: whisper(waveforms, lengths),
        "ours, log-mel, unequal lengths": lambda: whisper(waveforms, shorter),
        "torchaudio MelSpectrogram": lambda: mel(waveforms),
        "torchaudio MelSpectrogram + log": torchaudio_log,
        "ours, fbank": lambda: fbank(waveforms, lengths),
        "torchaudio kaldi.fbank, per waveform": lambda: [
            torchaudio.compliance.kaldi.fbank(w[None], window_type="hanning", num_mel_bins=128)
            for w in waveforms
        ],
    }
    try:
        from transformers import WhisperFeatureExtractor
    except ImportError:
        return calls
    extractor = WhisperFeatureExtractor()
    arrays = waveforms.cpu().numpy()
    calls["WhisperFeatureExtractor, numpy"] = lambda: extractor._np_extract_fbank_features(arrays, "cpu")
    calls["WhisperFeatureExtractor, torch"] = lambda: extractor._torch_extract_fbank_features(
        arrays, str(waveforms.device)
    )
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    waveforms = (torch.randn(args.batch, int(16000 * args.seconds)) * 0.1).to(args.device)
    calls = contenders(waveforms)

    times = {name: [] for name in calls}
    for i in range(args.rounds + 1):
        # a random order, so that no contender always runs after the same one
        for name, call in random.sample(list(calls.items()), len(calls)):
            start = time.perf_counter()
            call()
            if args.device != "cpu":
                torch.cuda.synchronize()
            if i:  # the first round creates filters and FFT plans
                times[name].append(time.perf_counter() - start)

    diff = (calls["ours, log-mel"]() - calls["torchaudio MelSpectrogram + log"]()[..., :-1].mT).abs().max()
    print(
        f"{args.batch} x {args.seconds:g} s, {args.device}, {torch.get_num_threads()} threads, {args.rounds} rounds"
    )
    print(f"largest difference from torchaudio + log: {diff:.1e}\n")
    print(f"{'':38s}{'median ms':>10s}{'x ours':>8s}{'range':>16s}")
    for name, t in times.items():
        ours = times["ours, fbank" if "fbank" in name else "ours, log-mel"]
        ratios = [a / b for a, b in zip(t, ours, strict=True)]
        median = statistics.median(t) / statistics.median(ours)
        spread = f"{min(ratios):.2f} - {max(ratios):.2f}"
        print(f"{name:38s}{statistics.median(t) * 1e3:10.1f}{median:8.2f}{spread:>16s}")
        if t is not ours:
            record(
                {
                    "what": f"spectrograms, {args.batch} x {args.seconds:g} s",
                    "ours": f"{statistics.median(ours) * 1e3:.1f} ms",
                    "peer": f"{name}: {statistics.median(t) * 1e3:.1f} ms",
                    "ratio": f"{median:.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                    "note": "",
                }
            )


if __name__ == "__main__":
    main()
