//! Arguments of `iwarp cp`.

use crate::auth::Secret;
use crate::part::Existing;
use crate::session::Terms;
use clap::{Args, ValueEnum};
use iwarp_cli_common::error::{Error, Result};
use iwarp_cli_common::service::{self, Limits};
use iwarp_cli_common::units;
use std::net::IpAddr;
use std::path::PathBuf;

/// Default port of `iwarp cp serve`.
pub(crate) const DEFAULT_PORT: u16 = 7176;
/// Default memory for all clients of a server, in bytes.
const DEFAULT_MEMORY: u64 = 256 << 20;

/// Arguments of `iwarp cp`.
#[derive(Debug, Args)]
#[command(override_usage = "iwarp cp [OPTIONS] FILE HOST:PATH
       iwarp cp [OPTIONS] HOST:PATH FILE
       iwarp cp [OPTIONS] serve DIR")]
#[command(
    after_help = "The sender writes the data by RDMA Write directly into the receiver's registered \
memory. If a copy is interrupted, the received part stays as .NAME.iwarp-part; the next copy \
verifies it by SHA-256 and continues. The file gets its own name only when it is complete and \
verified. A download replaces a local file of the same name, as cp and scp do. For a local file \
that is named 'serve' or '-', or whose name contains a colon, write ./serve, ./- or ./a:b.

By default only this host can reach a server, and clients can only read the files below DIR. \
--writable lets clients write new files, and --overwrite also lets them replace files. Files and \
folders whose names begin with a dot can be neither read nor written. With --bind other hosts can \
reach the server. Then give a secret (--secret-file, at both ends) or --anonymous. The secret \
keeps out clients that do not have it; the data are not encrypted.

EXAMPLES:
  iwarp cp serve /srv/drop --writable         on this host only; in another terminal:
  iwarp cp big.img 127.0.0.1:                 upload
  (umask 077; head -c 32 /dev/urandom | base64 > key)
                                              make a secret; copy it to the other host
  iwarp cp serve /srv/drop --bind 192.0.2.7 --writable --secret-file key
  iwarp cp --secret-file key big.img 192.0.2.7:images/big.img   upload from there
  iwarp cp --secret-file key 192.0.2.7:images/big.img .         download
  iwarp cp big.img [2001:db8::7]:big.img      IPv6 addresses in brackets
  iwarp cp big.img 192.0.2.7: --capture run.pcapng --capture-bytes 4M
                                              record the first megabytes for Wireshark"
)]
pub struct CpArgs {
    /// FILE or HOST:PATH, or `serve` to run a server
    #[arg(value_name = "FROM|serve")]
    from: String,
    /// HOST:PATH or FILE, or the directory to serve
    #[arg(value_name = "TO|DIR")]
    to: String,
    /// File with a secret of at least 16 bytes, the same at both ends; other users must not be able
    /// to read it
    #[arg(long, value_name = "FILE")]
    secret_file: Option<PathBuf>,
    /// TCP port [default: 7176]
    #[arg(short, long)]
    pub(crate) port: Option<u16>,
    /// MPA CRC [default: on, or as set by IWARP_CRC]
    #[arg(long, value_name = "on|off")]
    pub(crate) crc: Option<Crc>,
    /// Use MPA markers
    #[arg(long)]
    pub(crate) markers: bool,
    /// Record the connection in a pcapng file (needs no privileges)
    #[arg(long, value_name = "FILE.pcapng")]
    pub(crate) capture: Option<PathBuf>,
    /// Stop recording at this size, for example 4M [default: 16M, or as set by IWARP_CAPTURE_BYTES]
    #[arg(long, value_name = "SIZE", requires = "capture", value_parser = units::parse_size)]
    pub(crate) capture_bytes: Option<u64>,
    /// Start from the beginning even if a partial file exists
    #[arg(long)]
    pub(crate) no_resume: bool,
    /// Show no progress bar and no summary
    #[arg(short, long)]
    pub(crate) quiet: bool,
    /// Log more to stderr (repeat for even more)
    #[arg(short, long, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(flatten)]
    pub(crate) serve: ServeOptions,
}

#[derive(Debug, Args)]
#[command(next_help_heading = "Options of `serve`")]
pub(crate) struct ServeOptions {
    /// Address to listen on; 0.0.0.0 or :: for all [default: 127.0.0.1, which only this host can
    /// reach]
    #[arg(long, value_name = "ADDR")]
    bind: Option<IpAddr>,
    /// Let clients write new files
    #[arg(long)]
    writable: bool,
    /// Let clients replace files (implies --writable)
    #[arg(long)]
    overwrite: bool,
    /// Serve all clients that can reach the address, without a secret
    #[arg(long, conflicts_with = "secret_file")]
    anonymous: bool,
    /// Memory for all clients together [default: 256M]
    #[arg(long, value_name = "SIZE", value_parser = units::parse_size)]
    memory: Option<u64>,
    #[command(flatten)]
    pub(crate) limits: Limits,
}

impl ServeOptions {
    /// Returns the addresses to listen on; the server uses the first one that works.
    pub(crate) fn addresses(&self) -> Vec<IpAddr> {
        self.bind
            .map_or_else(|| service::LOOPBACK.to_vec(), |ip| vec![ip])
    }

    /// Returns the memory for all clients together, in bytes.
    pub(crate) fn memory(&self) -> u64 {
        self.memory.unwrap_or(DEFAULT_MEMORY)
    }

    fn is_local(&self) -> bool {
        self.addresses()
            .iter()
            .all(|ip| ip.to_canonical().is_loopback())
    }

    /// Returns the name of the first of these options that was given.
    fn given(&self) -> Option<&'static str> {
        [
            (self.bind.is_some(), "--bind"),
            (self.writable, "--writable"),
            (self.overwrite, "--overwrite"),
            (self.anonymous, "--anonymous"),
            (self.memory.is_some(), "--memory"),
        ]
        .into_iter()
        .find_map(|(given, name)| given.then_some(name))
        .or_else(|| self.limits.given())
    }
}

/// The MPA CRC switch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Crc {
    /// Request the CRC
    On,
    /// Use the CRC only if the peer requests it
    Off,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Call {
    /// Serves a directory.
    Serve {
        /// The served directory. Clients cannot reach files outside of it.
        dir: PathBuf,
    },
    Put {
        file: PathBuf,
        host: String,
        /// Path below the served directory.
        path: String,
    },
    Get {
        host: String,
        /// Path below the served directory.
        path: String,
        /// Local file or directory.
        file: PathBuf,
    },
}

impl CpArgs {
    /// Returns how often `--verbose` was given.
    #[must_use]
    pub fn verbose(&self) -> u8 {
        self.verbose
    }

    /// Checks that the arguments do not contradict each other.
    ///
    /// # Errors
    /// Returns a usage error if they do.
    pub fn check(&self) -> Result<()> {
        self.call().map(drop)
    }

    /// Reads the secret. Returns `None` without `--secret-file`.
    ///
    /// # Errors
    /// Fails if the file cannot be read, if other users can read it, or if the secret is too short
    /// or too long.
    pub(crate) fn secret(&self) -> Result<Option<Secret>> {
        self.secret_file.as_deref().map(Secret::read).transpose()
    }

    /// Returns the rules for the server's clients.
    ///
    /// # Errors
    /// Fails if other hosts could reach the server without a secret or `--anonymous`.
    pub(crate) fn terms(&self) -> Result<Terms> {
        let secret = self.secret()?;
        if secret.is_none() && !self.serve.anonymous && !self.serve.is_local() {
            return Err(Error::usage(
                "with --bind other hosts can reach the server: give --secret-file FILE (clients \
                 need the same secret), or --anonymous to admit every client",
            ));
        }
        let writing = match (self.serve.writable, self.serve.overwrite) {
            (_, true) => Some(Existing::Replace),
            (true, false) => Some(Existing::Keep),
            (false, false) => None,
        };
        Ok(Terms { writing, secret })
    }

    /// Returns `true` if the server serves other hosts without a secret.
    pub(crate) fn is_anonymous(&self) -> bool {
        self.serve.anonymous && !self.serve.is_local()
    }

    pub(crate) fn call(&self) -> Result<Call> {
        if self.from == "serve" {
            if self.no_resume {
                return Err(Error::usage(
                    "--no-resume is not valid with 'iwarp cp serve'",
                ));
            }
            return Ok(Call::Serve {
                dir: self.to.clone().into(),
            });
        }
        let port_zero = (self.port == Some(0)).then_some("--port 0");
        if let Some(option) = self.serve.given().or(port_zero) {
            return Err(Error::usage(format!(
                "{option} is valid with 'iwarp cp serve' only"
            )));
        }
        if self.from == "-" || self.to == "-" {
            return Err(Error::usage(
                "cannot copy to or from '-': a copy can only be verified and continued in a file \
                 (write ./- for a file named '-')",
            ));
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
            (None, None) => Err(Error::usage("one of the two arguments must be HOST:PATH")),
            (Some(_), Some(_)) => Err(Error::usage(
                "only one of the two arguments may be HOST:PATH",
            )),
        }
    }
}

/// Splits `HOST:PATH`. Returns `None` for a local file, which has a slash before any colon (as with
/// scp).
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
    fn three_forms_are_recognised() {
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
            &["..", "h:"],
            &["..", "h:d/"],
            &["a", "h:b", "--bind", "::1"],
            &["a", "h:b", "--writable"],
            &["a", "h:b", "--overwrite"],
            &["a", "h:b", "--anonymous"],
            &["a", "h:b", "--memory", "1M"],
            &["a", "h:b", "--max-clients", "3"],
            &["h:a", "-"],
            &["-", "h:b"],
        ] {
            assert!(matches!(call(bad), Err(Error::Usage(_))), "{bad:?}");
        }
        assert_eq!(call(&["./-", "h:c"]).unwrap(), put("./-", "h", "c"));
    }

    #[test]
    fn slashes_and_brackets_mark_files() {
        let host = |text| remote(text).unwrap().map(|(host, _)| host);
        assert_eq!(host("h:a:b").as_deref(), Some("h"));
        assert_eq!(remote("h:a:b").unwrap().unwrap().1, "a:b");
        assert_eq!(host("[fe80::1%eth0]:x").as_deref(), Some("fe80::1%eth0"));
        for local in ["d/a:b", "/a:b", "[::1]x", "[a", "a"] {
            assert_eq!(host(local), None, "{local}");
        }
        assert!(remote("[]:x").is_err());
    }

    /// The usage error names the option.
    #[test]
    fn serve_options_are_refused_in_copies() {
        for option in [
            &["--bind", "::1"][..],
            &["--writable"],
            &["--overwrite"],
            &["--anonymous"],
            &["--memory", "1M"],
            &["--max-clients", "3"],
            &["--max-per-address", "3"],
        ] {
            let e = call(&[&["a", "h:b"], option].concat()).unwrap_err();
            let named = format!("{} is valid with 'iwarp cp serve' only", option[0]);
            assert!(e.to_string().contains(&named), "{e}");
            call(&[&["serve", "/srv"], option].concat()).unwrap();
        }
    }

    #[test]
    fn server_defaults() {
        let args = |more: &[&str]| {
            Wrap::try_parse_from([&["cp", "serve", "/srv"], more].concat())
                .unwrap()
                .a
        };
        let plain = args(&[]);
        assert_eq!(plain.serve.addresses(), service::LOOPBACK);
        assert_eq!(plain.serve.memory(), 256 << 20);
        assert_eq!(args(&["--memory", "3M"]).serve.memory(), 3 << 20);
        assert_eq!(plain.port.unwrap_or(DEFAULT_PORT), 7176);
        assert_eq!([plain.verbose(), args(&["-vv"]).verbose()], [0, 2]);
        // The user is warned only if other hosts can connect.
        for (more, warned) in [
            (&[][..], false),
            (&["--anonymous"], false),
            (&["--anonymous", "--bind", "127.0.0.2"], false),
            (&["--anonymous", "--bind", "192.0.2.7"], true),
            (&["--bind", "192.0.2.7"], false),
        ] {
            assert_eq!(args(more).is_anonymous(), warned, "{more:?}");
        }
    }

    fn terms(args: &[&str]) -> Result<Terms> {
        Wrap::try_parse_from([&["cp", "serve", "/srv"], args].concat())
            .unwrap()
            .a
            .terms()
    }

    #[test]
    fn servers_are_local_and_read_only_by_default() {
        assert_eq!(terms(&[]).unwrap().writing, None);
        assert_eq!(
            terms(&["--writable"]).unwrap().writing,
            Some(Existing::Keep)
        );
        assert_eq!(
            terms(&["--overwrite"]).unwrap().writing,
            Some(Existing::Replace)
        );
        for local in ["127.0.0.1", "127.1.2.3", "::1", "::ffff:127.0.0.1"] {
            assert!(terms(&["--bind", local]).is_ok(), "{local}");
        }
        for open in ["0.0.0.0", "::", "192.0.2.7", "fe80::1"] {
            let e = terms(&["--bind", open]).unwrap_err();
            assert!(matches!(&e, Error::Usage(why)
                    if why.contains("--secret-file") && why.contains("--anonymous")));
            assert!(terms(&["--bind", open, "--anonymous"]).is_ok(), "{open}");
        }
        assert!(
            Wrap::try_parse_from(["cp", "serve", "/srv", "--anonymous", "--secret-file", "x"])
                .is_err()
        );
    }
}
