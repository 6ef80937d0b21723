//! The lines that one thread of a test logs.

use std::io;
use std::sync::{Arc, Mutex};

use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

/// What was logged on this thread since [`Log::start`].
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Collects until the guard is dropped, from the current thread alone.
    pub fn start(level: tracing::Level) -> (Self, DefaultGuard) {
        let log = Self::default();
        let subscriber =
            tracing_subscriber::fmt().with_max_level(level).with_ansi(false).without_time().with_writer(log.clone());
        let guard = tracing::subscriber::set_default(subscriber.finish());
        (log, guard)
    }

    /// The lines of this crate, of this level and above.
    pub fn lines(&self) -> Vec<String> {
        let bytes = self.0.lock().expect("not poisoned").clone();
        let text = String::from_utf8(bytes).expect("logs are text");
        text.lines().map(|line| line.trim().to_owned()).filter(|line| line.contains(" jobs: ")).collect()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("not poisoned").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}
