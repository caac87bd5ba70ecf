// A browser starts no Worker on a page that was opened from disk. The search then runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (message) => {
        const data = structuredClone(message); // as a real Worker does
        setTimeout(() => this.onmessage?.({ data }));
      };
      const script = inside.document.createElement("script");
      script.src = url;
      this.ready = new Promise((resolve, reject) => {
        script.onload = () => resolve(inside);
        script.onerror = reject;
      });
      this.ready.catch((error) => this.onerror?.(error));
      inside.document.body.append(script);
    }

    postMessage(message) {
      const data = structuredClone(message);
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })), () => {});
    }

    terminate() {
      this.frame.remove();
    }
  };
}
