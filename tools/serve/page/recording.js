// Audio from the microphone, and clips as WAV.
import { find } from "./dom.js";

const RATE = 16_000; // samples per second, as speech and audio encoders take them
const REASONS = {
  NotAllowedError: "The browser does not allow this page to use the microphone: allow it in the page's settings.",
  NotFoundError: "There is no microphone.",
};
let recorder = null, asks = false;

/** Records from a press of the button to the next; each recording is handed on. */
export function setUpRecording(onRecording, report) {
  find("record").addEventListener("click", async () => {
    if (recorder) return endRecording();
    if (asks) return;
    asks = true;
    try {
      await begin((recording) => { report(""); onRecording(recording); });
      report("recording");
    } catch (error) {
      report(REASONS[error.name] ?? error.message);
    } finally {
      asks = false;
    }
  });
}

async function begin(onRecording) {
  if (!navigator.mediaDevices) {
    throw new Error("Pages over http may record on localhost only: use https, or attach a file.");
  }
  const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
  const parts = [], made = new MediaRecorder(stream);
  made.addEventListener("dataavailable", ({ data }) => parts.push(data));
  made.addEventListener("stop", () => {
    for (const track of stream.getTracks()) track.stop();
    showRecording(null);
    onRecording(new File(parts, "Recording", { type: made.mimeType }));
  });
  made.start();
  showRecording(made);
  if (find("record").hidden) endRecording(); // another model was chosen meanwhile
}

/** Ends a recording, if there is one. */
export function endRecording() {
  if (recorder?.state === "recording") recorder.stop();
}

function showRecording(made) {
  recorder = made;
  find("record").textContent = made ? "End recording" : "Record";
}

/** A file's audio as WAV, 16 bits, mono; fails if the browser cannot decode it. */
export async function toWav(file) {
  const audio = await new OfflineAudioContext(1, 1, RATE).decodeAudioData(await file.arrayBuffer());
  const channels = Array.from({ length: audio.numberOfChannels }, (_, index) => audio.getChannelData(index));
  const view = new DataView(new ArrayBuffer(44 + 2 * audio.length));
  const head = [
    "RIFF", view.byteLength - 8, "WAVE", "fmt ", 16, 1 | (1 << 16), RATE, 2 * RATE, 2 | (16 << 16), "data",
    2 * audio.length,
  ];
  head.forEach((field, index) => {
    if (typeof field === "number") view.setUint32(4 * index, field, true);
    else [...field].forEach((letter, place) => view.setUint8(4 * index + place, letter.charCodeAt(0)));
  });
  for (let index = 0; index < audio.length; index += 1) {
    const mean = channels.reduce((sum, channel) => sum + channel[index], 0) / channels.length;
    view.setInt16(44 + 2 * index, Math.round(32_767 * Math.max(-1, Math.min(1, mean))), true);
  }
  return new Blob([view], { type: "audio/wav" });
}
