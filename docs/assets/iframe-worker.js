// A Worker for pages that are opened from files, where browsers allow none: the script runs in a hidden frame.
// The theme's search asks for window.IFrameWorker to know that it runs in one (mkdocs-material's "offline" plugin).
window.IFrameWorker = class extends EventTarget {
  constructor(url) {
    super();
    const frame = document.createElement("iframe");
    frame.hidden = true;
    document.body.append(frame);
    const inner = frame.contentWindow;
    inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
    this.inner = new Promise((resolve) => {
      const script = inner.document.createElement("script");
      script.src = new URL(url, document.baseURI);
      script.onload = () => resolve(inner);
      inner.document.body.append(script);
    });
  }

  postMessage(data) {
    this.inner.then((inner) => inner.dispatchEvent(new inner.MessageEvent("message", { data })));
  }
};
if (location.protocol === "file:") window.Worker = window.IFrameWorker;
