//! Arguments of `iwarp cp`.

use crate::error::{Error, Result};
use crate::units;
use clap::{Args, ValueEnum};
use std::net::IpAddr;
use std::path::PathBuf;

/// Port of `iwarp cp serve` when none is given.
pub(crate) const DEFAULT_PORT: u16 = 7176;

/// Arguments of `iwarp cp`.
#[derive(Debug, Args)]
#[command(override_usage = "iwarp cp [OPTIONS] FILE HOST:PATH
       iwarp cp [OPTIONS] HOST:PATH FILE
       iwarp cp [OPTIONS] serve DIR")]
#[command(
    after_help = "The data go by RDMA Write straight into the receiver's registered memory. What an interrupted copy \
has left behind (.NAME.iwarp-part) is verified by SHA-256 and continued; the file appears under its name only when \
complete and verified. Anybody who can reach the port can read and write files below DIR, and nothing else: bind to \
a trusted network. A file that is really named 'serve' or contains a colon is written ./serve or ./a:b.

EXAMPLES:
  iwarp cp serve /srv/drop --bind 192.0.2.7   on one host, then on another:
  iwarp cp big.img 192.0.2.7:images/big.img   upload
  iwarp cp 192.0.2.7:images/big.img .         download
  iwarp cp big.img [2001:db8::7]:big.img      IPv6 addresses in brackets
  iwarp cp big.img 192.0.2.7: --capture run.pcapng --capture-bytes 4M
                                              first megabytes for Wireshark"
)]
pub(crate) struct CpArgs {
    /// FILE or HOST:PATH, or the word `serve`
    #[arg(value_name = "FROM|serve")]
    from: String,
    /// HOST:PATH or FILE, or the directory to serve
    #[arg(value_name = "TO|DIR")]
    to: String,
    /// Address to listen on (with `serve`) [default: all]
    #[arg(long, value_name = "ADDR")]
    pub(crate) bind: Option<IpAddr>,
    /// TCP port [default: 7176]
    #[arg(short, long)]
    pub(crate) port: Option<u16>,
    /// MPA CRC
    #[arg(long, value_name = "on|off", default_value = "on")]
    pub(crate) crc: Crc,
    /// Use MPA markers
    #[arg(long)]
    pub(crate) markers: bool,
    /// Record the connection in a pcapng file (needs no privileges)
    #[arg(long, value_name = "FILE.pcapng")]
    pub(crate) capture: Option<PathBuf>,
    /// Stop recording after this much
    #[arg(long, value_name = "SIZE", default_value = "16M", requires = "capture", value_parser = units::parse_size)]
    pub(crate) capture_bytes: u64,
    /// Start from the beginning even if part of the file is there
    #[arg(long)]
    pub(crate) no_resume: bool,
    /// No progress bar and no summary
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Log more to stderr (repeat for even more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
}

/// The MPA CRC switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Crc {
    /// Used
    On,
    /// Not used unless the peer asks for it
    Off,
}

/// What the arguments ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    /// Serve a directory.
    Serve {
        /// Nothing outside is reachable.
        dir: PathBuf,
    },
    /// Upload.
    Put {
        /// Local file.
        file: PathBuf,
        /// Peer.
        host: String,
        /// Path below the served directory.
        path: String,
    },
    /// Download.
    Get {
        /// Peer.
        host: String,
        /// Path below the served directory.
        path: String,
        /// Local file or directory.
        file: PathBuf,
    },
}

impl CpArgs {
    /// How talkative the log shall be.
    pub(crate) fn verbose(&self) -> u8 {
        self.verbose
    }

    /// Sorts out which of the three forms this is.
    ///
    /// # Errors
    /// A usage error when it is none of them.
    pub(crate) fn call(&self) -> Result<Call> {
        if self.from == "serve" {
            return Ok(Call::Serve {
                dir: self.to.clone().into(),
            });
        }
        if self.bind.is_some() {
            return Err(Error::usage("--bind belongs to 'iwarp cp serve'"));
        }
        match (remote(&self.from)?, remote(&self.to)?) {
            (None, Some((host, path))) => {
                let file = PathBuf::from(&self.from);
                // `HOST:` and `HOST:dir/` keep the file's name.
                let path = if path.is_empty() || path.ends_with('/') {
                    let name = file.file_name().and_then(|n| n.to_str());
                    format!(
                        "{path}{}",
                        name.ok_or_else(|| Error::usage(format!(
                            "'{}' has no file name",
                            self.from
                        )))?
                    )
                } else {
                    path
                };
                Ok(Call::Put { file, host, path })
            }
            (Some((host, path)), None) => {
                if path.is_empty() || path.ends_with('/') {
                    return Err(Error::usage(format!("'{}' names no file", self.from)));
                }
                Ok(Call::Get {
                    host,
                    path,
                    file: self.to.clone().into(),
                })
            }
            (None, None) => Err(Error::usage("one of the two must be HOST:PATH")),
            (Some(_), Some(_)) => Err(Error::usage("only one of the two may be HOST:PATH")),
        }
    }
}

/// `HOST:PATH` → both; `None` for a local file. A slash before the first colon means local, as with scp.
fn remote(text: &str) -> Result<Option<(String, String)>> {
    let (host, path) = if let Some(rest) = text.strip_prefix('[') {
        match rest.split_once("]:") {
            Some((host, path)) => (host, path),
            None => return Ok(None),
        }
    } else {
        match text.split_once(':') {
            Some((host, _)) if host.contains('/') => return Ok(None),
            Some((host, path)) => (host, path),
            None => return Ok(None),
        }
    };
    if host.is_empty() {
        return Err(Error::usage(format!("'{text}' has no host")));
    }
    Ok(Some((host.to_owned(), path.to_owned())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Wrap {
        #[command(flatten)]
        a: CpArgs,
    }

    fn call(args: &[&str]) -> Result<Call> {
        Wrap::try_parse_from([&["cp"], args].concat())
            .unwrap()
            .a
            .call()
    }

    #[test]
    fn the_three_forms() {
        assert_eq!(
            call(&["serve", "/srv"]).unwrap(),
            Call::Serve { dir: "/srv".into() }
        );
        let put = |file: &str, host: &str, path: &str| Call::Put {
            file: file.into(),
            host: host.into(),
            path: path.into(),
        };
        assert_eq!(call(&["a", "h:b/c"]).unwrap(), put("a", "h", "b/c"));
        assert_eq!(call(&["x/a", "h:"]).unwrap(), put("x/a", "h", "a"));
        assert_eq!(
            call(&["x/a", "[::1]:d/"]).unwrap(),
            put("x/a", "::1", "d/a")
        );
        assert_eq!(call(&["./a:b", "h:c"]).unwrap(), put("./a:b", "h", "c"));
        assert_eq!(call(&["./serve", "h:c"]).unwrap(), put("./serve", "h", "c"));
        assert_eq!(
            call(&["h:a", "."]).unwrap(),
            Call::Get {
                host: "h".into(),
                path: "a".into(),
                file: ".".into()
            }
        );
        for bad in [
            &["a", "b"][..],
            &["h:a", "g:b"],
            &[":a", "b"],
            &["h:", "b"],
            &["h:d/", "b"],
            &["a", "h:b", "--bind", "::1"],
        ] {
            assert!(matches!(call(bad), Err(Error::Usage(_))), "{bad:?}");
        }
    }
}
