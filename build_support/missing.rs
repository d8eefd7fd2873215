//! The error of a build that lacks something.

use std::fmt;
use std::path::PathBuf;

/// A place that was looked at, and why it did not do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// Where the path comes from: an environment variable, a folder of this repository, `PATH`.
    pub origin: String,
    pub path: PathBuf,
    pub reason: String,
}

/// What is missing, where it was looked for, and the command that brings it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Missing {
    pub what: String,
    pub places: Vec<Place>,
    pub command: String,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "missing: {}", self.what)?;
        writeln!(f, "looked for it in:")?;
        for place in &self.places {
            writeln!(f, "  {} ({}): {}", place.path.display(), place.origin, place.reason)?;
        }
        write!(f, "to bring it: {}", self.command)
    }
}
