//! Which of several processes this one is, by the environment that whoever started them made: torchrun, Ray Train, Slurm, or `armt train --gpus`.

use std::num::NonZero;

use anyhow::{Context, Result, bail};

/// Where processes of one machine meet if nobody says where.
pub const LOCAL: &str = "127.0.0.1";
/// torchrun's port where none is named.
const PORT: u16 = 29500;

/// One process among several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seat {
    /// Its number, from 0.
    pub rank: usize,
    /// How many there are.
    pub world: usize,
    /// Its number on its machine.
    pub local: usize,
}

/// A variable of the environment.
pub fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

impl Seat {
    /// What torchrun's variables say, or else Slurm's; nothing where this process is alone.
    ///
    /// Of Slurm's those of a step count, which `srun` sets: a batch script has SLURM_NTASKS and SLURM_PROCID too, and is one process all the same.
    pub fn find(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let by = match variable("WORLD_SIZE").or(variable("RANK")) {
            Some(_) => ["WORLD_SIZE", "RANK", "LOCAL_RANK"],
            None => ["SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"],
        };
        let number =
            |name: &str| variable(name).map(|text| text.parse().with_context(|| format!("{name}: expected a number, got {text}")));
        let [world, rank, local] = by.map(number);
        let world = match (world.transpose()?, &rank) {
            (Some(world), _) => world,
            (None, Some(_)) if by[1] == "RANK" => bail!("RANK: expected WORLD_SIZE beside it"),
            (None, _) => return Ok(None),
        };
        if world == 1 {
            return Ok(None);
        }
        let [Some(rank), Some(local)] = [rank.transpose()?, local.transpose()?] else {
            bail!("{}: expected {} and {} beside it", by[0], by[1], by[2]);
        };
        if rank >= world {
            bail!("{}: expected a number below the {world} processes of {}, got {rank}", by[1], by[0]);
        }
        Ok(Some(Seat { rank, world, local }))
    }

    /// The GPU of this process among those that it is shown. Whoever gives each process a GPU of its own shows it that one alone.
    pub fn gpu(&self, shown: usize) -> usize {
        if shown == 1 { 0 } else { self.local }
    }
}

/// What NCCL must find in its environment when it is loaded and this environment does not say yet.
///
/// The first process listens at the port after the one where torchrun's processes meet. Buffers of graphs are not registered: that takes all processes
/// at once, and each records its graphs when the shapes of its own texts come again.
pub fn for_nccl(variable: &dyn Fn(&str) -> Option<String>) -> Result<Vec<(&'static str, String)>> {
    let mut missing = Vec::new();
    if variable("NCCL_COMM_ID").is_none() {
        let one_machine = variable("SLURM_STEP_NUM_NODES").is_some_and(|nodes| nodes == "1");
        let Some(address) = variable("MASTER_ADDR").or_else(|| one_machine.then(|| LOCAL.into())) else {
            bail!(
                "MASTER_ADDR: expected the address of the first process' machine, which torchrun sets; under Slurm: \
                 export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)"
            );
        };
        let port = match variable("MASTER_PORT") {
            Some(text) => text.parse::<NonZero<u16>>().with_context(|| format!("MASTER_PORT: expected a port, got {text}"))?.get(),
            None => PORT,
        };
        let port = port.checked_add(1).unwrap_or(port - 1);
        // As NCCL reads it: an address of version 6 has colons of its own.
        let address = if address.contains(':') && !address.starts_with('[') { format!("[{address}]") } else { address };
        missing.push(("NCCL_COMM_ID", format!("{address}:{port}")));
    }
    if variable("NCCL_GRAPH_REGISTER").is_none() {
        missing.push(("NCCL_GRAPH_REGISTER", "0".into()));
    }
    Ok(missing)
}

/// Runs this program anew in its place, with the same arguments, where NCCL's environment lacks something: to change that of a running process is
/// not safe once it has threads.
#[cfg(unix)]
pub fn with_environment_for_nccl() -> Result<()> {
    use std::os::unix::process::CommandExt;
    let missing = for_nccl(&variable)?;
    if missing.is_empty() {
        return Ok(());
    }
    let program = std::env::current_exe().context("this program's own file")?;
    Err(std::process::Command::new(program).args(std::env::args_os().skip(1)).envs(missing).exec()).context("to start anew")
}

/// There is no NCCL elsewhere.
#[cfg(not(unix))]
pub fn with_environment_for_nccl() -> Result<()> {
    bail!("several GPUs need NCCL, which is for Linux")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seat(variables: &[(&str, &str)]) -> Result<Option<Seat>> {
        Seat::find(&|name| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| value.to_string()))
    }

    fn said(variables: &[(&str, &str)]) -> String {
        format!("{:#}", seat(variables).unwrap_err())
    }

    #[test]
    fn torchruns_variables_come_before_slurms() {
        let slurm = [("SLURM_STEP_NUM_TASKS", "8"), ("SLURM_PROCID", "5"), ("SLURM_LOCALID", "1")];
        let torchrun = [("WORLD_SIZE", "4"), ("RANK", "3"), ("LOCAL_RANK", "2")];
        assert_eq!(seat(&torchrun).unwrap(), Some(Seat { rank: 3, world: 4, local: 2 }));
        assert_eq!(seat(&slurm).unwrap(), Some(Seat { rank: 5, world: 8, local: 1 }));
        assert_eq!(seat(&[torchrun, slurm].concat()).unwrap(), Some(Seat { rank: 3, world: 4, local: 2 }));
    }

    #[test]
    fn one_process_is_alone_and_a_batch_script_of_slurm_is_one_process() {
        assert_eq!(seat(&[]).unwrap(), None);
        assert_eq!(seat(&[("WORLD_SIZE", "1"), ("RANK", "0"), ("LOCAL_RANK", "0")]).unwrap(), None);
        assert_eq!(seat(&[("SLURM_NTASKS", "8"), ("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0")]).unwrap(), None);
    }

    #[test]
    fn what_is_missing_or_wrong_is_named() {
        assert!(said(&[("RANK", "1")]).contains("WORLD_SIZE"));
        assert!(said(&[("WORLD_SIZE", "2"), ("RANK", "1")]).contains("LOCAL_RANK"));
        assert!(said(&[("WORLD_SIZE", "two"), ("RANK", "1"), ("LOCAL_RANK", "1")]).contains("expected a number, got two"));
        assert!(said(&[("WORLD_SIZE", "2"), ("RANK", "-1"), ("LOCAL_RANK", "1")]).contains("expected a number, got -1"));
        assert!(said(&[("WORLD_SIZE", "2"), ("RANK", "2"), ("LOCAL_RANK", "0")]).contains("below the 2 processes"));
        assert!(said(&[("WORLD_SIZE", "0"), ("RANK", "0"), ("LOCAL_RANK", "0")]).contains("below the 0 processes"));
    }

    #[test]
    fn a_process_that_is_shown_one_gpu_takes_it() {
        let seat = Seat { rank: 5, world: 8, local: 1 };
        assert_eq!((seat.gpu(1), seat.gpu(4)), (0, 1));
    }

    #[test]
    fn the_first_process_listens_beside_torchruns_port() {
        let found = |variables: &[(&str, &str)]| {
            for_nccl(&|name| variables.iter().find(|(own, _)| *own == name).map(|(_, value)| value.to_string()))
        };
        let id = |variables: &[(&str, &str)]| found(variables).unwrap()[0].1.clone();
        assert_eq!(id(&[("MASTER_ADDR", "node1"), ("MASTER_PORT", "29500")]), "node1:29501");
        assert_eq!(id(&[("MASTER_ADDR", "node1")]), "node1:29501");
        assert_eq!(id(&[("MASTER_ADDR", "fd00::2"), ("MASTER_PORT", "65535")]), "[fd00::2]:65534");
        assert_eq!(id(&[("SLURM_STEP_NUM_NODES", "1")]), "127.0.0.1:29501");
        assert!(found(&[("SLURM_STEP_NUM_NODES", "2")]).unwrap_err().to_string().contains("scontrol show hostnames"));
        assert!(
            format!("{:#}", found(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "0")]).unwrap_err()).contains("expected a port, got 0")
        );
        assert_eq!(found(&[("NCCL_COMM_ID", "a:1")]).unwrap(), [("NCCL_GRAPH_REGISTER", "0".to_string())]);
        assert!(found(&[("NCCL_COMM_ID", "a:1"), ("NCCL_GRAPH_REGISTER", "1")]).unwrap().is_empty());
    }
}
