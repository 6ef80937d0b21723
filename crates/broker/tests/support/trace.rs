//! Captures what the code under test logs on this thread.

use std::io;
use std::sync::{Arc, Mutex};

use tracing_subscriber::fmt::MakeWriter;

/// The lines logged since [`capture`], until it is dropped.
pub struct Trace {
    lines: Lines,
    _guard: tracing::subscriber::DefaultGuard,
}

#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<u8>>>);

/// Starts to capture the lines of one target, each as level, message and fields.
pub fn capture(target: &str) -> Trace {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(format!("{target}=debug"))
        .with_writer(lines.clone())
        .with_ansi(false)
        .without_time()
        .with_target(false)
        .finish();
    Trace { lines, _guard: tracing::subscriber::set_default(subscriber) }
}

impl Trace {
    /// The lines of one level that contain `text`.
    pub fn lines(&self, level: &str, text: &str) -> Vec<String> {
        let bytes = self.lines.0.lock().expect("no holder panics").clone();
        let all = String::from_utf8(bytes).expect("text");
        let lines = all.lines().map(str::trim_start).filter(|line| line.starts_with(level) && line.contains(text));
        lines.map(str::to_owned).collect()
    }

    /// Waits until so many lines of a level contain `text`.
    pub async fn wait_for(&self, level: &str, text: &str, count: usize) {
        let what = format!("{count} {level} lines with {text:?}");
        super::until(&what, || count <= self.lines(level, text).len()).await;
    }
}

impl io::Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no holder panics").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl MakeWriter<'_> for Lines {
    type Writer = Self;

    fn make_writer(&self) -> Self {
        self.clone()
    }
}
